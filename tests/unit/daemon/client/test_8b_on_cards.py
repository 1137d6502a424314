"""Plans of an 8B model on cards, by the example job: the memory is checked by hand, and each card keeps its reserve."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.nodes_file import GB, parse_nodes
from headway.daemon.client.preview import PlanPreview, preview
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import read_job_file

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "8b-8k.toml"
H100 = '[[nodes.devices]]\nkind = "cuda"\nmodel = "NVIDIA H100"\nmemory_gb = 80.0\ntflops = 600.0\n'
EIGHT = f'[[nodes]]\nname = "one"\n{H100}count = 8\n'
MANY = f'[[nodes]]\nname = "node"\ncount = 4\n{H100}count = 8\n'
MIXED = f"""[[nodes]]
name = "big"
{H100}count = 2
[[nodes]]
name = "four"
[[nodes.devices]]
kind = "cuda"
model = "NVIDIA RTX 4090"
memory_gb = 24.0
tflops = 150.0
count = 4
[[nodes]]
name = "two"
[[nodes.devices]]
kind = "cuda"
model = "NVIDIA L40S"
memory_gb = 48.0
tflops = 200.0
count = 2
"""


def example(sequence_length: int) -> JobSpec:
    spec = read_job_file(EXAMPLE)[0]
    return replace(spec, train=replace(spec.train, sequence_length=sequence_length, recompute="block"))


def planned(spec: JobSpec, nodes: str) -> PlanPreview:
    found = parse_nodes(nodes, "n.toml")
    return preview(spec, found.records(spec.train), links=found.link_assumptions())[0]


def test_it_fits_on_unlike_cards_without_delay() -> None:
    """2 · 80 + 4 · 24 + 2 · 48 GB: each card has what its memory allows, beside its own reserve."""
    spec = example(8192)
    plan = planned(replace(spec, train=replace(spec.train, schedule="1f1b")), MIXED)
    sizes = {"big": 80, "four": 24, "two": 48}
    for worker in plan.plan.estimates:
        assert worker.device_bytes + (1 << 30) + sizes[worker.stage.node] * GB // 25 <= sizes[worker.stage.node] * GB


def test_the_scores_of_math_do_not_fit() -> None:
    """8.6 GB of scores in one block at 8k and twice as much for their gradients: two H100 are refused."""
    spec = example(8192)
    spec = replace(spec, train=replace(spec.train, attention_backend="math"))
    with pytest.raises(ConfigError, match=r"does not fit: .* in reserve"):
        planned(spec, MIXED.partition('[[nodes]]\nname = "four"')[0])


def test_a_card_without_a_stage_is_a_spare() -> None:
    """Eight cards, seven stages: the eighth has a name."""
    plan = planned(example(8192), EIGHT)
    used = {worker.device.removeprefix("cuda:") for worker in plan.plan.estimates}
    assert plan.spare_devices == tuple(f"one:{index}" for index in range(8) if str(index) not in used)
    assert [line for line in plan.lines if line.startswith("Spare")] == ["Spare: one:7."]


@pytest.mark.parametrize(("capability", "dtype"), [("", "bfloat16"), ("capability = 7.0", "float32")])
def test_keys_that_the_job_leaves_out_are_planned_as_submit_fixes_them(capability: str, dtype: str) -> None:
    """A job without `dtype`: bfloat16 on cards that compute it, and the plan says so."""
    spec = example(2048)
    spec = replace(spec, train=replace(spec.train, dtype="float32"))
    found = parse_nodes(f"{MANY}{capability}", "n.toml")
    plan = preview(spec, found.records(spec.train), named=(), links=found.link_assumptions())[0]
    told = [line for line in plan.lines if line.startswith("The job leaves some keys to the cards")]
    assert bool(told) == (dtype == "bfloat16")
    assert ("train.dtype = bfloat16" in plan.filled_in) == (dtype == "bfloat16")
