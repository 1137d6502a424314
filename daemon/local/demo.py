"""`headway demo`: three nodes train a small model, a fourth joins half way, and nothing is lost."""

import asyncio
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from headway.daemon.base.errors import ConfigError, JobFailedError
from headway.daemon.cluster.binary import binary_release, find_etcd_binary, remark
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.run import FAILURE_NAME, MODEL_NAME, run_job
from headway.daemon.plan.cluster_plan import layer_range
from headway.daemon.reports.job_report import report_job
from headway.daemon.reports.metrics_file import METRICS_NAME
from headway.daemon.reports.watch_view import draw_curve, open_display

NUM_NODES = 3
PROMPT = "def main():\n"
SAMPLE_BYTES = 240
CURVE_NAME = "loss.png"

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
batches = 260
microbatches = 8
microbatch_size = 4
sequence_length = 128

[optim]
matrices = { name = "muon", lr = 1e-2 }
rest = { name = "adamw", lr = 3e-3 }
warmup_batches = 10
"""
"""Text of docs/jobs/demo.toml, which an installed package does not contain; a test compares the two."""


class JoinHalfWay:
    """Adds a node when half of the batches are done, without blocking the display."""

    def __init__(self) -> None:
        self.plans: dict[int, PlanRecord] = {}
        """Plans that were in force, by generation."""
        self._joining: asyncio.Task[str] | None = None

    async def on_view(self, cluster: LocalCluster, _view: ClusterView, job: JobView) -> None:
        """Called with every state of the cluster."""
        if job.plan is not None:
            self.plans[job.plan.generation] = job.plan
        if job.spec is None or job.progress is None or self._joining is not None:
            return
        if job.progress.batch + 1 >= job.spec.train.batches // 2:
            self._joining = asyncio.create_task(cluster.add_node())

    async def joined(self) -> str:
        """Return the node that joined. Raises the error of its start, or ConfigError when the run was over before."""
        if self._joining is None:
            raise ConfigError("the run ended before half of its batches were seen; no node joined", "demo")
        return await self._joining


async def run_demo(out: Path, *, job_file: Path | None, force: asyncio.Event, etcd_binary: Path | None = None) -> int:
    """Train, show, explain; return the exit code. Raises the errors of `run_job`."""
    metrics, model = out / METRICS_NAME, out / MODEL_NAME
    if job_file is None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            job_file = out / "demo.toml"
            job_file.write_text(DEMO_JOB, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot be written to: {error.strerror}; name another folder with --out", str(out)
            ) from error
    _clear(out)
    _say(f"starting etcd and {NUM_NODES} nodes; a fourth joins half way")
    if told := remark(await asyncio.to_thread(binary_release, find_etcd_binary(etcd_binary))):
        _say(told)
    joining = JoinHalfWay()
    job = await run_job(
        job_file,
        num_nodes=NUM_NODES,
        most_nodes=NUM_NODES + 1,
        out=out,
        display=open_display(),
        force=force,
        etcd_binary=etcd_binary,
        on_view=joining.on_view,
    )
    assert job.spec is not None
    losses = check_metrics(metrics, num_batches=job.spec.train.batches)
    _say("")
    for line in draw_curve(losses, width=80, height=12):
        _say(line)
    _say("")
    _say(f"{await joining.joined()} joined half way. Who held which layers:")
    for generation, plan in sorted(joining.plans.items()):
        stages = " | ".join(
            f"{' + '.join(plan.workers[at].node for at in workers)}: {layer_range(plan.workers[workers[0]].layers)}"
            for workers in plan.replicas
        )
        _say(f"  generation {generation}, from batch {plan.boundary}: {stages}")
    report = report_job(job, {})
    _say(f"Exact: {'yes' if report.exact else 'no'}, because {report.exact_reason}.")
    _say(f"No batch was lost: {metrics} has each of the {len(losses)} batches once, in order.")
    from headway.daemon.models.model_folder import sample

    text = await asyncio.to_thread(sample, model, PROMPT, num_tokens=SAMPLE_BYTES)
    _say(f"\nThe model continues {PROMPT!r}:\n")
    _say("\n".join(f"  {line}" for line in (PROMPT + text).splitlines()))
    _say("")
    curve = draw_png(losses, out / CURVE_NAME)
    _say(f"losses  {metrics}")
    _say(f"model   {model}  (AutoModelForCausalLM opens it)")
    _say(f"curve   {curve}" if curve else "curve   not drawn: pip install 'headway[local]' brings matplotlib")
    _say(f"job     {job_file}  (change it, then: headway run {job_file} --nodes 2 --out DIR)")
    return 0


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


def draw_png(losses: list[tuple[int, float]], path: Path) -> Path | None:
    """Draw the loss curve as a picture; return None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([batch for batch, _ in losses], [loss for _, loss in losses])
    axes.set(xlabel="batch", ylabel="loss, nats per token", title="headway demo")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def _clear(out: Path) -> None:
    """Delete an earlier demo in this folder, because a demo starts from the beginning."""
    for old in (METRICS_NAME, FAILURE_NAME, CURVE_NAME):
        (out / old).unlink(missing_ok=True)
    for old in (MODEL_NAME, "state"):
        if (out / old).exists():
            shutil.rmtree(out / old)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
