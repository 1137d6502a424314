"""`headway demo`: three nodes train a small model, much goes wrong, and the bits are those of the plain loop."""

import asyncio
import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path

from headway.daemon.base.errors import ConfigError, JobFailedError
from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.base.terminal import behind, counted
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.run import FAILURE_NAME, MODEL_NAME, REPORT_NAME, run_job
from headway.daemon.reports.job_report import report_job
from headway.daemon.reports.metrics_file import METRICS_NAME, read_rows
from headway.daemon.reports.picture import OtherRun, Picture, with_other
from headway.daemon.reports.report_page import write_report
from headway.daemon.reports.watch_view import draw_curve, open_display

NUM_NODES = 3
PROMPT = "def main():\n"
SAMPLE_BYTES = 160
FAULTS_NAME = "faults.jsonl"
PLAIN_NAME = "plain"
LINKS_CUT_AT, WORKER_KILLED_AT, MACHINE_LOST_AT, NODE_JOINS_AT = 0.2, 0.35, 0.5, 0.7
"""Shares of the batches."""
CUT_S = 1.0

DEMO_JOB = """\
[job]
name = "demo"
seed = 7

[model]
num_hidden_layers = 6
hidden_size = 176
intermediate_size = 480
num_attention_heads = 8
num_key_value_heads = 4
vocab_size = 256

[train]
batches = 100
microbatches = 4
microbatch_size = 4
sequence_length = 128

[optim]
matrices = { name = "muon", lr = 1e-2 }
rest = { name = "adamw", lr = 3e-3 }
warmup_batches = 10

[fault]
snapshot_every = 5
"""
"""Text of docs/jobs/demo.toml, which an installed package does not contain; a test compares the two."""


class Troubles:
    """What goes wrong on the way: a link and a worker by the faults file, a machine and a newcomer by hand."""

    def __init__(self, out: Path) -> None:
        self.faults = out.absolute() / FAULTS_NAME
        self.lost_machine = ""
        self.joining: asyncio.Task[str] | None = None
        self._num_batches = 0

    def _arm(self) -> None:
        """Write the faults file: each strikes once, at the first worker that gets there."""
        cut = {"id": "links", "at": "operation", "do": "cut_links", "seconds": CUT_S}
        kill = {"id": "worker", "at": "operation", "do": "kill"}
        lines = [
            json.dumps(fault | {"when": {"batch": self._batch(share), "op": "backward", "microbatch": 0}})
            for fault, share in ((cut, LINKS_CUT_AT), (kill, WORKER_KILLED_AT))
        ]
        draft = self.faults.with_suffix(".part")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self.faults)

    def _batch(self, share: float) -> int:
        return max(int(share * self._num_batches), 1)

    async def on_view(self, cluster: LocalCluster, view: ClusterView, job: JobView) -> None:
        """Called with every state of the cluster."""
        if not self._num_batches and job.spec is not None:
            self._num_batches = job.spec.train.batches
            self._arm()
        if job.progress is None or job.plan is None:
            return
        done = job.progress.batch + 1
        if not self.lost_machine and done >= self._batch(MACHINE_LOST_AT):
            leader = view.leader.node if view.leader is not None else ""
            names = [worker.node for worker in job.plan.workers if worker.node != leader]
            if names and len(cluster.nodes) > 1:
                self.lost_machine = names[-1]
                cluster.remove_node(self.lost_machine)
        elif self.joining is None and done >= self._batch(NODE_JOINS_AT):
            self.joining = asyncio.create_task(cluster.add_node())

    async def joined(self) -> str:
        """Return the node that joined. Raises the error of its start, or ConfigError when the run was over before."""
        if self.joining is None:
            raise ConfigError("the run ended before so many batches were seen; no node joined", "demo")
        return await self.joining


async def run_demo(out: Path, *, job_file: Path | None, force: asyncio.Event, etcd_binary: Path | None = None) -> int:
    """Train, show, explain, compare; return the exit code. Raises the errors of `run_job`, and JobFailedError for
    other bits than the plain loop's.
    """
    job_file = job_file or out / "demo.toml"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _clear(out)
        if job_file == out / "demo.toml":
            job_file.write_text(DEMO_JOB, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written to: {error.strerror}; name another folder with --out", str(out)
        ) from error
    _say(f"starting etcd and {NUM_NODES} nodes; a link will be cut, a worker killed, a machine lost, and one will join")
    troubles = Troubles(out)
    job, picture = await run_job(
        job_file,
        num_nodes=NUM_NODES,
        most_nodes=NUM_NODES + 1,
        out=out,
        display=open_display(),
        force=force,
        etcd_binary=etcd_binary,
        on_view=troubles.on_view,
        environment={ENVIRONMENT: str(troubles.faults)},
    )
    assert job.spec is not None
    losses = check_metrics(out / METRICS_NAME, num_batches=job.spec.train.batches)
    for line in ("", *draw_curve(losses, width=80, height=10), ""):
        _say(line)
    await troubles.joined()
    for line in _story(picture) if picture is not None else ():
        _say(line)
    await _show_sample(out / MODEL_NAME)
    return await _compare(out, job_file, job, picture)


def _story(picture: Picture) -> list[str]:
    """Return what happened, why it recovered, and what it cost."""
    lines = ["What happened:"]
    failures = iter(picture.failures)
    for event in picture.events:
        if event.kind == "failure" and (failure := next(failures, None)) is not None and failure.still_s is not None:
            lines.append(f"  batch {failure.batch}: {event.text}")
            lines.append(
                f"      training again after {failure.still_s:.1f} s; "
                f"{counted(failure.num_again, 'batch')} computed again"
            )
        elif event.kind in ("plan", "note"):
            lines.append(f"  batch {event.batch}: {event.text}")
    return [
        *lines,
        "Why it recovered: every few batches each layer's state is copied to a second node, so another node had it.",
        f"{sum(each.num_again for each in picture.failures)} of {counted(picture.num_done, 'batch')} were "
        "computed again.",
        "",
    ]


async def _show_sample(model: Path) -> None:
    from headway.daemon.models.model_folder import sample

    _say(f"So small a model has learned how words look, and no more. It continues {PROMPT!r}:\n")
    text = await asyncio.to_thread(sample, model, PROMPT, num_tokens=SAMPLE_BYTES)
    _say("\n".join(f"  {line}" for line in (PROMPT + text).splitlines()) + "\n")


async def _compare(out: Path, job_file: Path, job: JobView, picture: Picture | None) -> int:
    """Train in the plain loop, and say whether losses and weights are the same. Raises JobFailedError."""
    from headway.daemon.local.reference_run import run_reference

    assert job.spec is not None
    _say(f"the plain loop, one process, trains the same {counted(job.spec.train.batches, 'batch')} for the comparison;")
    _say(f"{out / REPORT_NAME} is there already: a browser opens it meanwhile")
    plain, rows = out / PLAIN_NAME, read_rows(out / METRICS_NAME)
    progress = behind(sys.stderr) if sys.stderr.isatty() else None
    await asyncio.to_thread(run_reference, job_file, plain, progress=progress)
    if picture is not None:
        other = OtherRun(name="the plain loop", rows=read_rows(plain / METRICS_NAME))
        picture = with_other(picture, rows, other)
        write_report(picture, out / REPORT_NAME)
        assert picture.other is not None
        _say(f"losses   difference to the plain loop: {picture.other.sentence}")
    ours, theirs = weights_hash(out / MODEL_NAME), weights_hash(plain / MODEL_NAME)
    _say(f"weights  of the cluster     {ours}")
    _say(f"         of the plain loop  {theirs}  {'the same bits' if ours == theirs else 'OTHER BITS'}")
    exact = report_job(job, {})
    if ours != theirs and exact.exact is not False:
        raise JobFailedError("demo", "inexact", "its weights differ from the plain loop's", where=str(out))
    if not exact.exact:
        _say(f"         not exact, because {exact.exact_reason}")
    _say(f"report   {out / REPORT_NAME}  (a browser opens it; what you saw is drawn there)")
    _say(f"losses   {out / METRICS_NAME}; model {out / MODEL_NAME}  (AutoModelForCausalLM opens it)")
    _say(f"job      {job_file}  (change it, then: headway run {job_file} --nodes 2 --out DIR)")
    return 0


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of a model's weights: of its one file, as `sha256sum` prints it, or of several in order."""
    digest = sha256()
    for shard in sorted(folder.glob("*.safetensors")):
        with shard.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def check_metrics(path: Path, *, num_batches: int) -> list[tuple[int, float]]:
    """Return the (batch, loss) pairs of a metrics file. Raises JobFailedError unless each batch is there
    exactly once.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    batches = [row["batch"] for row in rows]
    if batches != list(range(num_batches)):
        raise JobFailedError(
            "demo", "incomplete", f"{len(set(batches))} of {num_batches} batches, {len(batches)} lines", where=str(path)
        )
    return [(row["batch"], row["loss"]) for row in rows]


def _clear(out: Path) -> None:
    """Delete an earlier demo in this folder, because a demo starts from the beginning."""
    for old in (METRICS_NAME, FAILURE_NAME, REPORT_NAME, FAULTS_NAME):
        (out / old).unlink(missing_ok=True)
    for old in (MODEL_NAME, PLAIN_NAME, "state", f"{FAULTS_NAME}.struck"):
        if (out / old).exists():
            shutil.rmtree(out / old)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
