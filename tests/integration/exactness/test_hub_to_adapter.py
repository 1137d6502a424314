"""From a folder of the Hub to an adapter, on four unlike nodes with three kills. Read it from the top to the bottom.

`llama` is a folder as transformers writes it. `hub` is what people have: links into a cache, shards with a second copy
of the head, a stock template, conversations of several turns and with tools in three formats, and a base in 4 bits. All
commands are those that a user types.
"""

import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import WITHOUT_SPARES, until
from tests.rigs.paces import paced_layers

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

import transformers

from tests.rigs.hub_folder import write_hub_chats, write_hub_model
from tests.rigs.hub_to_adapter import headway, workers_of
from tests.rigs.tiny_chats import VOCABULARY, write_chat_tokenizer, write_chats
from tests.rigs.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(600)]

LLAMA: dict[str, Any] = {  # Llama 3.2: its own head_dim, a tied embedding, and positions that are scaled
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
SIZES = {
    "llama": {"batches": 60, "length": 64, "rank": 4, "quantize": "none", "lr": 0.01},
    "hub": {"batches": 160, "length": 256, "rank": 8, "quantize": "nf4", "lr": 0.02},
}
JOB = """\
[job]
name = "sums"
[model]
from = "model"
[adapter]
rank = {rank}
alpha = {rank}
quantize = "{quantize}"
[data]
source = "data"
[train]                  # 2bw, and Muon with Error Feedback, are the defaults
batches = {batches}
microbatches = 4
microbatch_size = 2
sequence_length = {length}
[optim]
warmup_batches = 5
matrices = {{ name = "muon", lr = {lr} }}
[fault]
snapshot_every = 5
[placement]
min_nodes = 4
recut = false
"""
PATIENCE_S = 300.0
UNLIKE_S = {"node_2": 0.002, "node_3": 0.004, "node_4": 0.001}
"""Seconds by which a layer's forward is slower than on node-1."""


@dataclass(frozen=True)
class Trained:
    """A folder with `model`, the trained `adapter`, `merged`, and `plain` of the single process."""

    folder: Path
    is_hub: bool
    generations: set[int]
    """Numbers of the plans that computed the result."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=sorted(SIZES))
async def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trained]:
    """All of it: model, data, job, cluster, three kills, export; and the plain loop of the same job file."""
    folder = tmp_path_factory.mktemp(request.param)
    is_hub, sizes = request.param == "hub", SIZES[request.param]
    if is_hub:
        (folder / "model").symlink_to(write_hub_model(folder / "cache"))
        sources = write_hub_chats(folder)
    else:
        write_tiny_model(folder / "model", **LLAMA)
        write_chat_tokenizer(folder / "model")
        write_chats(folder / "chats.jsonl")
        sources = ["chats.jsonl"]
    (folder / "job.toml").write_text(JOB.format(**sizes))

    packed = f"--chat --tokenizer model --pack {sizes['length']} --out data"
    await headway(folder, f"data prepare {' '.join(sources)} {packed}")
    await headway(folder, "reference job.toml --out plain")
    environment = paced_layers(folder, 0.002, **UNLIKE_S)
    async with (
        LocalCluster(
            folder / ".headway", num_nodes=4, node_settings=WITHOUT_SPARES, environment=environment
        ) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await headway(folder, "submit job.toml")

        job = await reached(session, 10)
        assert len({worker.node for worker in workers_of(job)}) == 4
        os.kill(workers_of(job)[-1].pid, signal.SIGKILL)  # the worker that computes the losses

        await reached(session, 20, after=job)
        job = await reached(session, 25)
        cluster.kill_node("node-1")  # a daemon with its worker; the daemon is started again

        job = await reached(session, 40, after=job)
        cluster.remove_node("node-2")  # for good, with all that it held
        await cluster.add_node()

        over = (Phase.FINISHED, Phase.FAILED)
        job = await until(session, lambda _, job: job.phase.phase in over, "sums", timeout_s=PATIENCE_S)
        assert job.phase.phase is Phase.FINISHED, job.phase.error
        await headway(folder, "export sums --out adapter")
        await headway(folder, "export sums --merge --out merged")
        yield Trained(folder, is_hub, {event.generation for event in job.events.values()})


async def test_the_adapters_are_those_of_the_single_process(trained: Trained) -> None:
    """Three kills, at least four plans: every byte of the adapters is that of `headway reference`."""
    assert len(trained.generations) >= 4
    piped, plain = (trained.folder / place / "adapter_model.safetensors" for place in ("adapter", "plain/model"))
    assert piped.read_bytes() == plain.read_bytes()
    assert all(tensor.any() for tensor in load_file(piped).values()), "an adapter was never trained"


async def test_the_loss_falls(trained: Trained) -> None:
    """The adapters learn how the answers look."""
    losses = [json.loads(line)["loss"] for line in (trained.folder / "plain/metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


async def test_transformers_opens_the_merged_model(trained: Trained) -> None:
    """Its logits are those of the model with the adapters beside it, its text has the template."""
    opened = opened_model(trained.folder / "merged")
    assert (logits_of(opened) - logits_of(opened_model(trained.folder / "model"))).abs().max() > 1e-2
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(trained.folder / "merged")
    question = [{"role": "user", "content": "What is 1 + 2?"}]
    if not trained.is_hub:
        beside = opened_model(trained.folder / "model")
        put_beside(beside, trained.folder / "adapter")
        torch.testing.assert_close(logits_of(opened), logits_of(beside), atol=1e-5, rtol=0)
        said = tokenizer.apply_chat_template(question, tokenize=False)
        assert said == "<|start|>user\nWhat is 1 + 2?<|end|>"
        return
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
    )
    answer = opened.generate(**asked, max_new_tokens=40, do_sample=False)[0][asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is ")
    assert answer[-1] == tokenizer.eos_token_id
    assert len(answer) < 40


@pytest.mark.filterwarnings("ignore")
async def test_peft_opens_the_adapter(trained: Trained) -> None:
    """PEFT, given the exported folder, computes the same logits."""
    peft = pytest.importorskip("peft", reason="peft is not installed: nothing opens the adapter's folder")
    opened = peft.PeftModel.from_pretrained(opened_model(trained.folder / "model"), str(trained.folder / "adapter"))
    beside = opened_model(trained.folder / "model")
    put_beside(beside, trained.folder / "adapter")
    torch.testing.assert_close(logits_of(opened), logits_of(beside), atol=1e-5, rtol=0)


async def reached(session: ClusterSession, batch: int, *, after: JobView | None = None) -> JobView:
    """Wait for a batch, if need be of a later plan than that of `after`."""
    generation = 0 if after is None or after.plan is None else after.plan.generation + 1

    def has_come(_: ClusterView, job: JobView) -> bool:
        assert job.phase.phase is not Phase.FAILED, job.phase.error
        progress = job.progress
        return progress is not None and progress.batch >= batch and progress.generation >= generation

    return await until(session, has_come, "sums", timeout_s=PATIENCE_S)


def opened_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(48).reshape(2, 24) * 7 % VOCABULARY
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


def put_beside(model: nn.Module, folder: Path) -> None:
    """Add B·(A·x) · alpha/rank to the output of each adapted matrix, from the names in the exported folder alone."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale: float = config["lora_alpha"] / config["r"]
    adapters = load_file(folder / "adapter_model.safetensors")
    for key in [key for key in adapters if key.endswith(".lora_A.weight")]:
        down, up = adapters[key], adapters[key.replace("lora_A", "lora_B")]

        def add(_: nn.Module, given: Any, output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
            return output + nn.functional.linear(nn.functional.linear(given[0], down), up) * scale

        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        model.get_submodule(name).register_forward_hook(add)
