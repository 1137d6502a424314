"""One job through a killed worker, a killed machine, a join, a cut link and a drain, against the plain loop.

A local cluster of three nodes trains a small decoder. The bench strikes at fixed batches and waits after each strike
until the job trains on the expected number of nodes. Then the plain loop trains the same job in this process. Every
loss and every byte of the exported weights must be equal; else the exit code is 1. --plot draws both loss curves,
the strikes and the number of nodes. Cutting a link needs root; without it the bench leaves the cut out.
"""

import argparse
import asyncio
import filecmp
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rigs.measure import progress

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.export import export
from headway.daemon.client.job_requests import submit
from headway.daemon.client.job_watch import JournalCopy, wait_for_phase
from headway.daemon.client.node_requests import drain
from headway.daemon.cluster.records import Device, Phase, PlanRecord, WorkerRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.models.model_folder import write_model
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.tokens import TokenShards
from headway.stages.spec import ModelSpec, TrainSpec
from tests.chaos.outages import Parting, can_destroy

NAME = "curve"
NUM_NODES = 3
NUM_BATCHES = 400
TIMEOUT_S = 300.0
CUT_S = 2.0
MODEL = ModelSpec(
    hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2
)
OPTIM = OptimSpec(matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=3e-3))


@dataclass(slots=True)
class Run:
    """The job's run in the cluster."""

    strikes: list[tuple[int, str]] = field(default_factory=list)
    """The batch in progress at each strike, and its label."""
    plans: dict[int, PlanRecord] = field(default_factory=dict)
    """Plans by generation."""
    losses: list[float] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    """The generation that computed each batch."""

    @property
    def num_nodes(self) -> list[int]:
        """Return how many nodes computed each batch."""
        return [len({stage.node for stage in self.plans[number].workers}) for number in self.generations]


def curve_job() -> JobSpec:
    """A job of less than a minute on two cores."""
    spec = JobSpec(
        job=JobSection(name=NAME, seed=7),
        model=MODEL,
        train=TrainSpec(batches=NUM_BATCHES, microbatches=4, microbatch_size=2, sequence_length=64),
        optim=OPTIM,
        fault=FaultSpec(snapshot_every=10, copies=2),
    )
    return resolve_job(spec, job_file=Path("curve.toml"), devices=(Device(kind="cpu"),), cache_dir=default_cache_dir())


class Story:
    """Strikes at the cluster, one after the other."""

    def __init__(self, cluster: LocalCluster, session: ClusterSession, run: Run) -> None:
        self._cluster = cluster
        self._session = session
        self._run = run

    async def tell(self) -> None:
        """Strike at fixed batches; after each strike wait for the expected number of nodes."""
        await self._strike(50, "a worker killed", self._kill_worker, num_nodes=3)
        await self._strike(110, "a machine killed", self._kill_machine, num_nodes=2)
        await self._strike(170, "a machine joins", self._join, num_nodes=3)
        if can_destroy():
            await self._strike(250, f"a link cut for {CUT_S:g} s", self._cut_link, num_nodes=3)
        await self._strike(320, "a machine drained", self._drain, num_nodes=2)

    async def _strike(self, batch: int, label: str, strike: Callable[[], Awaitable[None]], *, num_nodes: int) -> None:
        job = await self._until(lambda job: job.progress is not None and job.progress.batch >= batch)
        assert job.progress is not None
        assert job.plan is not None
        generation = job.plan.generation
        self._run.strikes.append((job.progress.batch, label))
        await strike()
        changes = strike != self._cut_link
        await self._until(lambda job: _trains_on(job, num_nodes, after=generation if changes else -1))
        progress(f"batch {self._run.strikes[-1][0]}: {label}; trains on {num_nodes} nodes")

    async def _until(self, condition: Callable[[JobView], bool]) -> JobView:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                job = (await self._session.view()).jobs.get(NAME)
                if job is not None and condition(job):
                    return job
                if job is not None and job.phase.phase in (Phase.FAILED, Phase.FINISHED):
                    raise RuntimeError(f"the job is {job.phase.phase} too early: {job.phase.reason}")
                await asyncio.sleep(0.05)

    async def _workers(self) -> list[WorkerRecord]:
        job = (await self._session.view()).jobs[NAME]
        assert job.plan is not None
        workers = job.workers_of(job.plan)
        return [workers[position] for position in sorted(workers)]

    async def _kill_worker(self) -> None:
        os.kill((await self._workers())[1].pid, signal.SIGKILL)

    async def _kill_machine(self) -> None:
        node = (await self._workers())[1].node
        await asyncio.to_thread(self._cluster.remove_node, node)

    async def _join(self) -> None:
        await self._cluster.add_node()

    async def _cut_link(self) -> None:
        first, second, *_ = await self._workers()
        with Parting() as parting:
            parting.pids, parting.others = [first.pid], [second.pid]
            await asyncio.sleep(CUT_S)

    async def _drain(self) -> None:
        await drain(self._session, (await self._workers())[0].node)


def _trains_on(job: JobView, num_nodes: int, *, after: int) -> bool:
    plan = job.plan
    if plan is None or job.phase.phase is not Phase.RUNNING or plan.generation <= after:
        return False
    return len({stage.node for stage in plan.workers}) == num_nodes and job.next is None


async def _collect_plans(cluster: LocalCluster, run: Run) -> None:
    async with ClusterSession(cluster.address) as session:
        async for view in session.follow():
            job = view.jobs.get(NAME)
            if job is not None and job.plan is not None:
                run.plans[job.plan.generation] = job.plan


async def cluster_run(spec: JobSpec, folder: Path) -> Run:
    """Train the job in a cluster through all strikes; the model lies in folder/piped."""
    run = Run()
    async with (
        LocalCluster(folder / "cluster", num_nodes=NUM_NODES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        collecting = asyncio.create_task(_collect_plans(cluster, run))
        await submit(session, spec)
        await Story(cluster, session, run).tell()
        job = await wait_for_phase(session, NAME, frozenset({Phase.FINISHED}), timeout_s=TIMEOUT_S)
        if job.phase.phase is not Phase.FINISHED:
            raise RuntimeError(f"the job is {job.phase.phase}: {job.phase.reason}")
        await export(session, NAME, folder / "piped")
        copy = JournalCopy(session, NAME, folder / "metrics.jsonl")
        try:
            await copy.copy_whole(NUM_BATCHES)
        finally:
            await copy.close()
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run.losses = [line["loss"] for line in lines]
    run.generations = [line["generation"] for line in lines]
    return run


def plain_run(spec: JobSpec, folder: Path) -> list[float]:
    """Train the same job in the plain loop; the model lies in folder/plain."""
    results: list[BatchResult] = []
    tokens = TokenShards.open(data_folder(spec.data.source, default_cache_dir()))
    weights = reference(spec, tokens, on_batch=results.append)
    write_model(folder / "plain", spec.model, weights=weights, sequence_length=spec.train.sequence_length)
    return [result.loss for result in results]


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two model folders have equal shards, byte for byte."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    if not names or names != sorted(path.name for path in other.glob("*.safetensors")):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def plot(run: Run, plain: list[float], file: Path) -> None:
    """Both loss curves, one on top of the other, with the strikes; below them the number of nodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(11, 4.6), sharex=True, gridspec_kw={"height_ratios": (4, 1), "hspace": 0.08}
    )
    top.plot(plain, color="#f0b429", lw=5, alpha=0.6, label="plain single-process loop")
    top.plot(run.losses, color="#1b6ca8", lw=1, label="cluster, through every change: equal to the last bit")
    bottom.fill_between(range(len(run.losses)), run.num_nodes, step="post", color="#1b6ca8", alpha=0.35)
    for batch, label in run.strikes:
        for axis in (top, bottom):
            axis.axvline(batch, color="#c8553d", lw=1, ls="--")
        top.text(batch + 3, 0.6, label, color="#c8553d", fontsize=9, transform=top.get_xaxis_transform())
    top.set_ylabel("training loss (nats)")
    top.legend(fontsize=9, loc="upper right")
    bottom.set(xlabel="batch", ylabel="nodes", xlim=(0, len(plain)), ylim=(0, 3.6), yticks=(1, 2, 3))
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110, bbox_inches="tight")


def main() -> int:
    """Train both, compare them, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="where to draw the curves, as a PNG")
    options = parser.parse_args()
    spec = curve_job()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        folder = Path(name)
        run = asyncio.run(cluster_run(spec, folder))
        plain = plain_run(spec, folder)
        has_same_weights = same_weights(folder / "piped", folder / "plain")
    has_same_losses = run.losses == plain
    is_exact = has_same_losses and has_same_weights
    if options.plot and is_exact:  # the picture claims equal bits
        plot(run, plain, options.plot)
    found = {
        "batches": len(plain),
        "generations": len(run.plans),
        "strikes": run.strikes,
        "same_losses": has_same_losses,
        "same_weights": has_same_weights,
    }
    print(json.dumps(found))
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
