"""One job of the soak: a cluster, a schedule of faults from a seed, and everything that must be true afterwards."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from headway.daemon.base.errors import StoreError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import pause, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from headway.daemon.local.campaign import ETCD_REST_S, Campaign, Watcher
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.fault_schedule import Blow, FaultKind, Strike, fault_schedule
from headway.daemon.local.injector import LocalTargets
from tests.chaos.checker import Bounds, FaultSeen, Sample, check
from tests.chaos.outages import CUTTING, NUM_CONNECTIONS, SoakInjector, can_destroy
from tests.chaos.read_history import read_history
from tests.chaos.residue import Residue, sample_for_ever
from tests.integration.exactness.training import Oracle, Result, assert_same_bits, come_to, finished, small_job
from tests.rigs.paces import paced_layers

KINDS = (
    *("kill", "kill", "daemon-kill", "leader-kill", "worker-pause", "pause", "slow", "flap", "corrupt", "truncate"),
    *("etcd-stop", "etcd-kill", "lease-loss", "leader-loss", "drain", "link-cut", "unreachable", "storage-away"),
    *("poison-job", "idle-connections", "disk-full"),
)
IMPOSSIBLE = () if can_destroy() else CUTTING
"""Left out where they are drawn, so that a seed's other faults are the same on every machine."""
LEASE_TTL_S = 2
LONGEST_S = 6.0
HANG_S = 60.0
START_TIMEOUT_S = 90.0
DRAINED_AFTER_S = 3.0
EVERY_NTH_IS_DOUBLE = 5
NUM_LOG_LINES = 12
BOUNDS = Bounds(amounts={**Bounds().amounts, "fds": Bounds().amounts["fds"] + NUM_CONNECTIONS})
"""A daemon also holds the silent connections of a fault until it closes them; growth is bounded as ever."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakCase:
    """Everything about one job of the soak follows from this."""

    seed: int
    num_nodes: int
    batches: int
    duration_s: float
    rate_per_minute: float
    schedule: str
    reduction_groups: int
    clip_norm: float
    sync_batches: int = 0
    kinds: tuple[str, ...] = KINDS
    layer_s: float = 0.0
    """Least seconds of a layer's forward; its backward takes twice as long. A long job then costs little to compute."""
    device: str = "cpu"
    """Kind of device of all nodes. A job on cards computes in bfloat16, as their jobs do."""
    is_paused_at_end: bool = False
    """True if the job is paused after the last fault, at any batch."""
    has_history: bool = True
    """True if every operation is recorded and checked; for a run of hours that would be gigabytes."""

    @classmethod
    def of(cls, seed: int, *, duration_s: float, batches: int, rate_per_minute: float) -> "SoakCase":
        """Three to six nodes, every schedule, with and without clipping and reduction groups, in turn. Every second 2bw
        has no delay in the first half of the job.
        """
        return cls(
            seed=seed,
            num_nodes=3 + seed % 4,
            batches=batches,
            duration_s=duration_s,
            rate_per_minute=rate_per_minute,
            schedule=("2bw", "1f1b", "2bw", "gpipe")[seed // 2 % 4],
            sync_batches=(0, 0, batches // 2, 0)[seed // 2 % 4],
            reduction_groups=(1, 2)[seed // 3 % 2],
            clip_norm=(0.5, 0.0)[seed // 5 % 2],
        )

    @property
    def name(self) -> str:
        return f"soak-{self.seed}"

    def spec(self) -> JobSpec:
        """The job, resolved."""
        spec = small_job(
            self.name,
            device=self.device,
            dtype="float32" if self.device == "cpu" else "bfloat16",
            batches=self.batches,
            schedule=self.schedule,
            sync_batches=self.sync_batches,
            reduction_groups=self.reduction_groups,
            clip_norm=self.clip_norm,
        )
        fault = FaultSpec(snapshot_every=5, copies=2, checkpoint_every=40, link_timeout_s=10.0)
        return replace(spec, fault=fault, placement=PlacementSpec(min_nodes=1, max_nodes=self.num_nodes))

    def strikes(self) -> tuple[Strike, ...]:
        """The faults; every fifth strikes together with the one before it."""
        drawn = fault_schedule(
            seed=self.seed,
            kinds=self.kinds,
            rate_per_minute=self.rate_per_minute,
            duration_s=self.duration_s,
            longest_s=LONGEST_S,
        )
        return tuple(
            replace(strike, at_s=drawn[index - 1].at_s) if index % EVERY_NTH_IS_DOUBLE == 4 else strike
            for index, strike in enumerate(drawn)
            if strike.kind not in IMPOSSIBLE
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a case."""

    case: SoakCase
    blows: list[Blow] = field(default_factory=list)
    phase: str = ""
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0
    num_generations: int = 0
    max_amounts: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    """(monotonic seconds, batch) of every sight of a batch that was never reached before."""

    @property
    def recoveries_s(self) -> list[float]:
        """Return the recovery times of the faults after which there was a new generation."""
        return [b.recovery_s for b in self.blows if b.recovery_s is not None and b.new_generation is not None]

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        times = self.recoveries_s
        return (
            str(self.case.seed),
            str(self.case.num_nodes),
            self.case.schedule,
            str(len(self.blows)),
            str(self.num_generations),
            f"{median(times):.2f}" if times else "-",
            f"{max(times):.2f}" if times else "-",
            str(sum(blow.recomputed for blow in self.blows)),
            f"{self.seconds:.0f}",
            "ok" if not self.troubles else f"{len(self.troubles)} troubles",
        )


async def soak(case: SoakCase, folder: Path, oracle: Oracle, *, say: Say) -> Outcome:
    """Run one case in a folder of its own. Whatever is wrong is in the outcome's troubles; nothing is raised for it."""
    began, outcome, residue = time.monotonic(), Outcome(case=case), Residue(folder)
    spec, history = case.spec(), folder / "history"
    samples: list[Sample] = []
    faults: list[FaultSeen] = []
    result = await train_under_faults(case, spec, folder, outcome, samples, faults, say)
    outcome.troubles += overdue_leaves(folder / "state")
    if outcome.troubles:
        outcome.troubles += last_warnings(folder / "state")
    outcome.troubles += await residue.found()
    try:
        if case.has_history:
            outcome.troubles += _history_troubles(case, spec, history, faults, samples, outcome)
        if result is not None:
            assert_same_bits(result, oracle(spec))
    except Exception as error:
        outcome.troubles.append(f"{type(error).__name__}: {str(error)[:500]}")
    outcome.seconds = time.monotonic() - began
    return outcome


async def train_under_faults(
    case: SoakCase,
    spec: JobSpec,
    folder: Path,
    outcome: Outcome,
    samples: list[Sample],
    faults: list[FaultSeen],
    say: Say,
) -> Result | None:
    """The cluster from its start to its stop. Nothing of it is held afterwards, so that what is open is left open."""
    settings: dict[str, object] = {"quarantine_after": 0, "lease_ttl_s": LEASE_TTL_S, "devices": case.device}
    if case.has_history:
        settings["history_dir"] = folder / "history"
    cluster = LocalCluster(
        folder / "state",
        num_nodes=case.num_nodes,
        node_settings=settings,
        stop_timeout_s=20.0,
        environment=paced_layers(folder, case.layer_s) if case.layer_s else {},
    )
    try:
        async with cluster, ClusterSession(cluster.address) as session, AsyncExitStack() as stack:
            await submit(session, spec)
            await wait_for_phase(session, case.name, frozenset({Phase.RUNNING}), timeout_s=START_TIMEOUT_S)
            noting = asyncio.create_task(_note_progress(session, case.name, outcome.progress))
            stack.callback(noting.cancel)
            watcher, seen = await _strike(case, cluster, session, samples, say)
            faults += seen
            outcome.blows, outcome.phase = watcher.blows, str(watcher.phase)
            outcome.troubles += watcher.failures
            if not outcome.troubles:
                return await _finished(session, case, folder)
    except Exception as error:  # a soak goes on with its next case
        outcome.troubles.append(f"{type(error).__name__}: {error}")
    return None


async def _note_progress(session: ClusterSession, name: str, progress: list[tuple[float, int]]) -> None:
    """Watch until cancelled; etcd may be away meanwhile."""
    while True:
        views = session.follow()
        try:
            async for view in views:
                job = view.jobs.get(name)
                if job is not None and job.progress is not None:
                    furthest = progress[-1][1] if progress else -1
                    if job.progress.batch > furthest:
                        progress.append((time.monotonic(), job.progress.batch))
        except StoreError:
            await asyncio.sleep(ETCD_REST_S)
        finally:
            await views.aclose()


async def _strike(
    case: SoakCase, cluster: LocalCluster, session: ClusterSession, samples: list[Sample], say: Say
) -> tuple[Watcher, list[FaultSeen]]:
    targets = LocalTargets.of(cluster.state_dir)
    later: set[asyncio.Task[None]] = set()

    def tell(what: str, blow: Blow) -> None:
        say(f"{blow.at_s:6.1f} s  {blow.number:3d} {blow.kind}: " + (blow.target if what == "struck" else _how(blow)))
        if what == "struck" and blow.kind == FaultKind.DRAIN:
            later.add(asyncio.create_task(_leave_and_join(cluster, blow.target)))

    sampling = asyncio.create_task(sample_for_ever(targets, samples))
    try:
        async with SoakInjector(session, targets=targets, job=case.name) as injector:
            begin = time.monotonic() - injector.now_s
            campaign = Campaign(session, injector, job=case.name, strikes=case.strikes(), tell=tell, settle_s=HANG_S)
            watcher = await campaign.run()
            seen = [
                FaultSeen(
                    text=f"fault {blow.number} ({blow.kind}, {blow.target})",
                    at=begin + blow.at_s,
                    until=begin + (blow.until_s if blow.until_s is not None else blow.at_s),
                )
                for blow in watcher.blows
            ]
            return watcher, seen
    finally:
        for task in (sampling, *later):
            task.cancel()
        await asyncio.wait({sampling, *later})


async def _leave_and_join(cluster: LocalCluster, node: str) -> None:
    """A node that was drained stops; the cluster starts it again, and it joins."""
    await asyncio.sleep(DRAINED_AFTER_S)
    cluster.kill_node(node, signal.SIGKILL)


def _how(blow: Blow) -> str:
    how = "in the same generation" if blow.new_generation is None else f"in generation {blow.new_generation}"
    return f"training continued after {blow.recovery_s:.2f} s {how}; batches recomputed: {blow.recomputed}"


async def _finished(session: ClusterSession, case: SoakCase, folder: Path) -> Result:
    """The job's end, which may take as long as it gets on: a hang is no progress for HANG_S."""
    if case.is_paused_at_end:
        await pause(session, case.name)
    phase = await _until_over(session, case.name)
    (folder / "out").mkdir(parents=True, exist_ok=True)
    read = come_to if phase is Phase.PAUSED else finished
    return await read(session, case.name, folder / "out")


async def _until_over(session: ClusterSession, name: str) -> Phase:
    seen: tuple[object, ...] = ()
    views = session.follow()
    try:
        while True:
            async with asyncio.timeout(HANG_S):
                while (now := _position(view := await anext(views), name)) == seen:
                    pass
            seen = now
            phase = view.jobs[name].phase.phase
            if phase in (Phase.FINISHED, Phase.PAUSED, Phase.FAILED, Phase.CANCELLED):
                return phase
    except TimeoutError as error:
        raise TimeoutError(f"hang: nothing new for {HANG_S:g} s after {seen}") from error
    finally:
        await views.aclose()


def _position(view: ClusterView, name: str) -> tuple[object, ...]:
    job = view.jobs[name]
    progress = (job.progress.generation, job.progress.batch) if job.progress is not None else None
    return (job.phase.phase.value, job.phase.reason, job.phase.generation, progress)


def _history_troubles(
    case: SoakCase, spec: JobSpec, folder: Path, faults: list[FaultSeen], samples: list[Sample], outcome: Outcome
) -> list[str]:
    history = replace(read_history(folder, case.name), faults=faults, samples=samples)
    outcome.num_generations = len(history.plans)
    for sample in samples:
        for what, amount in sample.amounts.items():
            outcome.max_amounts[what] = max(amount, outcome.max_amounts.get(what, 0))
    if not history.operations:
        return ["the history is empty"]
    return list(check(history, spec, BOUNDS))


def overdue_leaves(state_dir: Path) -> list[str]:
    """Nodes that waited to the end of their time to leave, though no job was left to wait for."""
    logs = sorted((state_dir / "nodes").glob("*/daemon.log"))
    overdue = [path.parent.name for path in logs if '"leave_overdue"' in path.read_text(errors="replace")]
    return [f"{name}: did not leave in time when the cluster stopped" for name in overdue]


def last_warnings(state_dir: Path) -> list[str]:
    """The last warnings and errors of each daemon's log."""
    found = []
    for path in sorted((state_dir / "nodes").glob("*/daemon.log")):
        lines = path.read_text(errors="replace").splitlines()
        bad = [line for line in lines if '"level": "warning"' in line or '"level": "error"' in line or "Error" in line]
        found += [f"{path.parent.name}: {_short(line)}" for line in bad[-NUM_LOG_LINES:]]
    return found


def _short(line: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError:
        return line[:300]
    kept = {name: value for name, value in fields.items() if name not in ("level", "node")}
    return json.dumps(kept)[:400]
