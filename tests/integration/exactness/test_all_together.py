"""What a fine-tuning uses, all at once: a model's folder, chats packed in rows, a mask, documents, epochs, evaluation.

The losses, the held-out losses and every byte of what is exported are those of `headway reference`, with adapters and
with all weights, at any number of nodes, and through a join, a kill and a pause.
"""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Device, Phase
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.reference_run import run_reference
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_model import with_parts
from tests.integration.exactness.training import WITHOUT_SPARES, Result, finished, until_batch
from tests.rigs.paces import paced_layers

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from tests.rigs.hub_to_adapter import headway, workers_of
from tests.rigs.tiny_chats import VOCABULARY, write_chat_tokenizer, write_chats
from tests.rigs.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PATIENCE_S = 300.0
LAYER_S = 0.02
"""Pace of the layers until all changes have happened, so that none comes too late."""
ADAPTER: Final = "[adapter]\nrank = 4\nalpha = 8\n"
ROUTED: Final = {"head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
QWEN3_MOE: Final = ROUTED | {"num_experts": 6}
DOTS1: Final = ROUTED | {"n_routed_experts": 6, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
ROUTER_LOSSES: Final = "router_balance_loss = 0.02\nrouter_z_loss = 0.001\n"


@dataclass(frozen=True, slots=True)
class Features:
    """One row: what the model is, and which further lines its job has."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of the model's config."""
    lines: str = ""
    """Of the job file."""
    train: str = ""
    """Further lines of its [train]."""


FEATURES = (
    Features("qwen3-lora", "qwen3", {"head_dim": 16}, ADAPTER),
    Features("qwen3-full", "qwen3", {"head_dim": 16}),
    Features("tied-lora", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}, ADAPTER),
    Features("tied-full", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    Features("mixture", "dots1", DOTS1, train=ROUTER_LOSSES),
    Features("tied-mixture", "qwen3_moe", QWEN3_MOE | {"tie_word_embeddings": True}, train=ROUTER_LOSSES),
    Features("tied-mixture-lora", "qwen3_moe", QWEN3_MOE | {"tie_word_embeddings": True}, ADAPTER),
)
JOB = """\
[job]
name = "together"
[model]
from = "model"
[data]
source = "data"
[train]                  # Muon with Error Feedback is the default
schedule = "{schedule}"
epochs = 4
microbatches = 6
microbatch_size = 2
sequence_length = 64
eval_every = 7
{train}[optim]
warmup_batches = 5
[fault]
snapshot_every = 5
{lines}"""


@dataclass(frozen=True, slots=True)
class Plain:
    """What the plain loop leaves."""

    losses: tuple[float, ...]
    eval_losses: tuple[float, ...]
    files: Mapping[str, bytes]

    def assert_equals(self, piped: Result, folder: Path) -> None:
        """Raise AssertionError unless a run has these losses, and its exported folder these files."""
        assert piped.losses == self.losses
        assert piped.eval_losses == self.eval_losses
        assert weight_files(folder) == self.files


class Workshop:
    """One row's folder, with `model`, `data`, a job file for each schedule, and what the plain loop makes of it."""

    def __init__(self, folder: Path, features: Features) -> None:
        self.features = features
        self._folder = folder
        self._plain: dict[str, Plain] = {}

    async def prepare(self) -> None:
        """Write the model, its tokenizer, and chats as packed rows."""
        options = {"vocab_size": VOCABULARY, "num_hidden_layers": 5, **self.features.options}
        await asyncio.to_thread(
            write_tiny_model, self._folder / "model", model_type=self.features.model_type, **options
        )
        write_chat_tokenizer(self._folder / "model")
        write_chats(self._folder / "chats.jsonl", count=400)
        prepare = "data prepare chats.jsonl --chat --tokenizer model --pack 64 --validation 0.2 --out data"
        await headway(self._folder, prepare)
        for schedule in ("2bw", "1f1b"):
            self._file(schedule).write_text(
                JOB.format(schedule=schedule, lines=self.features.lines, train=self.features.train)
            )

    def job(self, name: str, schedule: str, placement: PlacementSpec) -> JobSpec:
        """Return the job under another name, as `submit` would put it into the queue."""
        file = self._file(schedule)
        given, named = read_job_file(file, open_model=model_opener(self._folder))
        given = replace(given, job=replace(given.job, name=name), origin=replace(given.origin, job=name))
        given = replace(given, placement=placement)
        devices = (Device(kind="cpu"),)
        spec = resolve_job(given, job_file=file, devices=devices, cache_dir=default_cache_dir(), named=named)
        assert spec.train.has_mask
        assert spec.train.separates_documents
        assert spec.train.data_order == "epochs"
        return with_parts(spec)

    def plain(self, schedule: str) -> Plain:
        """Return what `headway reference` makes of the job."""
        if schedule not in self._plain:
            out = self._folder / f"plain-{schedule}"
            run_reference(self._file(schedule), out, device="cpu")
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            eval_losses = tuple(line["eval_loss"] for line in lines if "eval_loss" in line)
            assert len(eval_losses) > 2
            losses = tuple(line["loss"] for line in lines)
            self._plain[schedule] = Plain(losses, eval_losses, weight_files(out / "model"))
        return self._plain[schedule]

    def _file(self, schedule: str) -> Path:
        return self._folder / f"{schedule}.toml"


def weight_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of weights."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found
    return found


@pytest.fixture(scope="module")
def workshops() -> dict[str, Workshop]:
    """Rows that are prepared."""
    return {}


async def workshop_of(features: Features, workshops: dict[str, Workshop], factory: pytest.TempPathFactory) -> Workshop:
    """Return a row's folder, prepared once."""
    if features.name not in workshops:
        workshop = Workshop(factory.mktemp(features.name), features)
        await workshop.prepare()
        workshops[features.name] = workshop
    return workshops[features.name]


NODES = (1, 2, 3, 5)
SCHEDULES = ("2bw", "1f1b")
SHORT = ("qwen3-lora", "2bw", 3)
"""The case that the default suite has too."""


def everywhere() -> list[object]:
    """Every row with every schedule, at each number of nodes."""
    cases = [(features, schedule, nodes) for features in FEATURES for schedule in SCHEDULES for nodes in NODES]
    return [
        pytest.param(
            *case,
            id=f"{case[0].name}-{case[1]}-{case[2]}",
            marks=() if (case[0].name, *case[1:]) == SHORT else pytest.mark.slow,
        )
        for case in cases
    ]


@pytest.mark.parametrize(("features", "schedule", "nodes"), everywhere())
async def test_everything_together_on_any_number_of_nodes(
    cluster: LocalCluster,
    workshops: dict[str, Workshop],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    features: Features,
    schedule: str,
    nodes: int,
) -> None:
    """So many stages: each loss, each held-out loss and each byte of the files is that of the plain loop."""
    workshop = await workshop_of(features, workshops, tmp_path_factory)
    name = f"together-{features.name}-{schedule}-{nodes}"
    spec = workshop.job(name, schedule, PlacementSpec(min_nodes=nodes, max_nodes=nodes))
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        piped = await finished(session, name, tmp_path, timeout_s=PATIENCE_S)
    workshop.plain(schedule).assert_equals(piped, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: features.name)
async def test_everything_together_through_a_join_a_kill_and_a_pause(
    workshops: dict[str, Workshop],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    features: Features,
    schedule: str,
) -> None:
    """Two nodes train and a third joins, a worker is killed, the job is paused and resumed: the plain loop's bytes."""
    workshop = await workshop_of(features, workshops, tmp_path_factory)
    name = f"changed-{features.name}-{schedule}"
    spec = workshop.job(name, schedule, PlacementSpec(min_nodes=2, max_nodes=3))
    environment = paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(
            tmp_path / "cluster", num_nodes=2, node_settings=WITHOUT_SPARES, environment=environment
        ) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        job = await until_batch(session, name, 2, timeout_s=PATIENCE_S)
        assert len(workers_of(job)) == 2
        await cluster.add_node()
        later = job.phase.generation + 1
        job = await until_batch(session, name, 3, generation=later, timeout_s=PATIENCE_S)
        assert len(workers_of(job)) == 3
        os.kill(workers_of(job)[-1].pid, signal.SIGKILL)
        later = job.phase.generation + 1
        job = await until_batch(session, name, 4, generation=later, timeout_s=PATIENCE_S)
        await pause(session, name)
        await wait_for_phase(session, name, frozenset({Phase.PAUSED}), timeout_s=PATIENCE_S)
        (tmp_path / "paces").unlink()
        await resume(session, name)
        piped = await finished(session, name, tmp_path, timeout_s=PATIENCE_S)
    assert len(set(piped.generations)) >= 3, "what the join's plan had trained may be rolled back by the kill"
    workshop.plain(schedule).assert_equals(piped, tmp_path / "model")
