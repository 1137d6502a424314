"""The promise: losses and weights are a function of the job, whatever number of nodes trains it."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from headway.daemon.local.cluster import LocalCluster
from headway.optim.spec import OptimSpec
from tests.integration.exactness.training import (
    ADAMW_WITHOUT_ERROR_FEEDBACK,
    MUON_WITH_ERROR_FEEDBACK,
    Oracle,
    assert_same_bits,
    small_job,
    train,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

NODES = (1, 2, 3, 5)
SCHEDULES = ("2bw", "1f1b", "gpipe")
OPTIMIZERS = {"muon-ef": MUON_WITH_ERROR_FEEDBACK, "adamw": ADAMW_WITHOUT_ERROR_FEEDBACK}
CLIPS = (0.5, 0.0)
GROUPS = (1, 3)

LINKS = ("grpc", "collective")

Case = tuple[int, str, str, float, int, str]
EVERY_CASE: list[Case] = [
    case for case in product(NODES, SCHEDULES, OPTIMIZERS, CLIPS, GROUPS, LINKS) if case[0] > 1 or case[-1] == "grpc"
]


def is_default(case: Case) -> bool:
    """A subset: 2bw on any number of nodes, the other schedules on one number each, and one job on collective links.

    Among them every optimizer meets every clipping and number of groups that are tried.
    """
    nodes, schedule, optimizer, clip, groups, link = case
    if nodes != {"1f1b": 5, "gpipe": 3}.get(schedule, nodes) or (
        link == "collective" and (nodes, schedule) != (2, "2bw")
    ):
        return False
    turn = (NODES.index(nodes) + SCHEDULES.index(schedule)) % 4
    return (optimizer, clip, groups) == (
        ("muon-ef", 0.5, 1), ("adamw", 0.0, 3), ("muon-ef", 0.0, 3), ("adamw", 0.5, 1)
    )[turn]  # fmt: skip


def parameters() -> list[object]:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if is_default(case) else pytest.mark.slow)
        for case in EVERY_CASE
    ]


@pytest.mark.parametrize(("nodes", "schedule", "optimizer", "clip", "groups", "link"), parameters())
async def test_any_number_of_nodes_gives_the_bits_of_the_plain_loop(
    cluster: LocalCluster,
    oracle: Oracle,
    tmp_path: Path,
    nodes: int,
    schedule: str,
    optimizer: str,
    clip: float,
    groups: int,
    link: str,
) -> None:
    """A job trained on so many nodes, over links of either kind, ends with the losses and weights of the plain loop."""
    optim: OptimSpec = OPTIMIZERS[optimizer]
    name = f"same-{nodes}-{schedule}-{optimizer}-{'clip' if clip else 'free'}-{groups}-{link}"
    spec = small_job(name, optim=optim, schedule=schedule, clip_norm=clip, reduction_groups=groups, link=link)
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=nodes), oracle(spec))


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 3])
async def test_bfloat16_jobs_have_the_bits_of_the_plain_loop_too(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, nodes: int
) -> None:
    """A bf16 job with its fp32 master ends with the reference's losses and master weights."""
    spec = small_job(f"bf16-{nodes}", dtype="bfloat16")
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=nodes), oracle(spec))


@pytest.mark.parametrize(
    "part", ["block", *(pytest.param(part, marks=pytest.mark.slow) for part in ("elementwise", "attention"))]
)
async def test_computing_again_changes_no_bit(cluster: LocalCluster, oracle: Oracle, tmp_path: Path, part: str) -> None:
    """A job that computes blocks, or a part of them, again, on three nodes → the reference, which keeps every graph."""
    plain = small_job("kept")
    spec = small_job(f"again-{part}", recompute=part)
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=3), oracle(plain))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")
@pytest.mark.parametrize("nodes", [1, 3])
async def test_compiled_jobs_have_the_bits_of_the_compiled_loop(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, nodes: int
) -> None:
    """Layers compiled by torch, on each node by itself → the losses and weights of the loop that compiles them too."""
    spec = small_job(f"compiled-{nodes}", compile=True)
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=nodes), oracle(spec))


@pytest.mark.parametrize(
    ("optimizer", "rest"),
    [
        ("lion", "lion"),
        pytest.param("sgd", "sgd", marks=pytest.mark.slow),
        pytest.param("soap", "mars", marks=pytest.mark.slow),
        pytest.param("normuon", "adan", marks=pytest.mark.slow),
    ],
)
async def test_the_other_optimizers_have_the_bits_of_the_plain_loop_too(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, optimizer: str, rest: str
) -> None:
    """Error Feedback around Lion, SGD with momentum, and those that keep more, on two stages."""
    from headway.optim.spec import GroupSpec

    matrices, others = (GroupSpec(name=name, lr=1e-3) for name in (optimizer, rest))
    optim = OptimSpec(matrices=matrices, rest=others, lr_schedule="wsd", warmup_batches=2)
    spec = small_job(f"other-{optimizer}", optim=optim)
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=2), oracle(spec))
