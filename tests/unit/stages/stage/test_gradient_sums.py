"""Sums in one order, without copies where that is safe; squares in one order too."""

import math

import pytest
import torch

from headway.daemon.local import reference_loop
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.stage import relays
from headway.stages.stage.batch_gradients import GradientSums
from headway.stages.stage.relays import clip_coefficient, layer_squares, parameter_squares
from headway.stages.sums import fold
from tests.second_oracle import clipping


def test_groups_are_summed_apart_and_then_in_order() -> None:
    """Numbers whose sum depends on its order → that of the groups: ((a + c) + (b + d)) / 4."""
    a, b, c, d = (torch.tensor([x]) for x in (1e8, 1.0, -1e8, 3.0))
    sums = GradientSums(num_microbatches=4, num_groups=2)
    for i, gradient in enumerate((a, b, c, d)):
        sums.add(i, [gradient.clone()])
    assert sums.reduce()[0].item() == 1.0
    assert sums.is_empty
    for i, gradient in enumerate((a, b, c, d)):
        sums.add(i, [gradient.clone()])
    assert not sums.is_empty
    in_one_group = GradientSums(num_microbatches=4, num_groups=1)
    for i, gradient in enumerate((a, b, c, d)):
        in_one_group.add(i, [gradient.clone()])
    assert in_one_group.reduce()[0].item() == 0.75


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
def test_group_by_group_two_sums_are_open_at_most(num_groups: int) -> None:
    """All microbatches of a group after those of the one before → the total and one more, and the bits of any order."""
    m = 11
    schedule = StageSchedule(
        delay=1, depth=4, num_microbatches=m, num_groups=num_groups, group_by_group=True, is_first=True, is_last=True,
        num_batches=1,
    )  # fmt: skip
    gradients = [torch.randn(33, generator=torch.Generator().manual_seed(i)) for i in range(m)]
    in_turn, rising = (GradientSums(num_microbatches=m, num_groups=num_groups) for _ in range(2))
    most = 0
    for i in schedule.held_microbatches:
        in_turn.add(i, [gradients[i].clone()])
        most = max(most, in_turn.num_open)
    for i in range(m):
        rising.add(i, [gradients[i].clone()])
    assert most == min(2, num_groups)
    assert torch.equal(in_turn.reduce()[0], rising.reduce()[0])


def test_a_complete_group_waits_for_the_ones_before() -> None:
    """Groups end from the last to the first → none is added early, and the sum has the order of the groups."""
    a, b, c = (torch.tensor([x]) for x in (1e8, 1.0, -1e8))
    sums = GradientSums(num_microbatches=3, num_groups=3)
    for i, gradient in ((2, c), (1, b), (0, a)):
        sums.add(i, [gradient.clone()])
        assert sums.num_open == {2: 1, 1: 2, 0: 1}[i]
    assert sums.reduce()[0].item() == ((a + b + c) * (1 / 3)).item()


def test_replicas_keep_their_groups_apart() -> None:
    """A worker that does not reduce → one sum for each of its groups, complete or not."""
    sums = GradientSums(num_microbatches=4, num_groups=4, is_reduced_here=False)
    for i in (0, 1):
        sums.add(i, [torch.ones(1)])
    assert len(sums.take()) == 2


def test_microbatches_out_of_order_are_refused() -> None:
    """Microbatch 1 before 0 of one group → our own bug, found."""
    with pytest.raises(AssertionError, match="out of order"):
        GradientSums(num_microbatches=2, num_groups=1).add(1, [torch.ones(1)])


def test_the_first_gradient_is_kept_without_a_copy() -> None:
    """A fresh fp32 tensor becomes the sum itself."""
    sums, gradient = GradientSums(num_microbatches=2, num_groups=1), torch.ones(4)
    sums.add(0, [gradient])
    sums.add(1, [torch.ones(4)])
    assert sums.reduce()[0].data_ptr() == gradient.data_ptr()


def test_memory_that_somebody_else_reads_is_never_written() -> None:
    """A gradient that is another's memory, a view, an expansion or twice the same → copied before it is added to."""
    frame, base, twice = torch.ones(2), torch.ones(4), torch.ones(2)
    gradients = [frame, base[:2], torch.ones(1).expand(2), twice, twice]
    sums = GradientSums(num_microbatches=2, num_groups=1)
    sums.add(0, gradients, others=[frame])
    sums.add(1, [torch.full((2,), 3.0) for _ in gradients])
    assert [total.tolist() for total in sums.reduce()] == [[2.0, 2.0]] * 5
    assert frame.tolist() == [1.0, 1.0]
    assert base.tolist() == [1.0] * 4


def test_bfloat16_gradients_are_cast_before_they_are_added() -> None:
    """256 + 1 in bf16 would stay 256 → 257 in fp32."""
    sums = GradientSums(num_microbatches=1, num_groups=1)
    sums.add(0, [torch.tensor([256.0], dtype=torch.bfloat16)])
    sums.add(1, [torch.tensor([1.0], dtype=torch.bfloat16)])
    total = sums.reduce()[0]
    assert total.dtype == torch.float32
    assert total.item() == 257.0


def test_squares_are_folded_in_name_order_in_float64() -> None:
    """Names out of order, values whose sum depends on it → the fold of the sorted names."""
    gradients = {"b": torch.tensor([3.0]), "a": torch.tensor([1e8, 1.0]), "c": torch.tensor([0.1])}
    tenth = float(torch.tensor(0.1, dtype=torch.float32))
    squares = parameter_squares(gradients).tolist()
    assert layer_squares([], {"block.0": dict(zip("abc", squares, strict=True))}) == [
        ((1e16 + 1.0) + 9.0) + tenth * tenth
    ]
    assert fold([1e16, 1.0, 1.0]) == 1e16 != fold([1.0, 1.0, 1e16])


def test_a_block_cut_between_stages_has_the_square_of_the_whole() -> None:
    """The MLP's parameters come before attention's by name, or between them → the fold in name order, on any cut."""
    mixing, mlp = {"a.norm": 1.0, "self_attn": 1.0}, {"mlp": 1.0, "z.norm": 1e16}
    whole = layer_squares([], {"head": {"w": 2.0}, "block.0": mlp | mixing, "embed": {"w": 5.0}})
    assert whole == [2.0, fold([1.0, 1.0, 1.0, 1e16]), 5.0] != [2.0, fold([1.0, 1e16, 1.0, 1.0]), 5.0]
    below = layer_squares([], {"head": {"w": 2.0}, "block.0.mlp": mlp})
    assert below == [2.0, 1.0, 1e16]
    above = {"block.0.attention": mixing, "embed": {"w": 5.0}}
    assert layer_squares(below, above, awaited=sorted(mlp)) == whole
    middle = layer_squares(below, {"block.0.attention": mixing}, awaited=sorted(mlp))
    assert layer_squares(middle, {"embed": {"w": 5.0}}) == whole


def test_a_large_gradient_is_squared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two elements, of which the first swallows a one → the fold of the pieces, not one sum over all."""
    monkeypatch.setattr(relays, "PIECE_ELEMENTS", 2)
    gradient = torch.tensor([[1e8, 0.0], [1.0, 1.0], [1.0, 0.0]])
    assert parameter_squares({"a": gradient}).tolist() == [(1e16 + 2.0) + 1.0]


def test_a_large_gradient_has_one_norm_in_the_pipeline_and_in_both_oracles() -> None:
    """Matrices of one and a half pieces, whose sum at once often has another last bit → equal norms."""
    numbers = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0))
    for start in range(24):
        gradient = {"block.0": {"up": numbers[start : start + (3 << 19)].view(-1, 1024)}}
        norm = math.sqrt(*parameter_squares(gradient["block.0"]).tolist())
        assert norm == reference_loop.norm_of(gradient, is_tied=False) == clipping.norm(gradient, is_tied=False)


def test_the_coefficient_only_ever_shrinks() -> None:
    """A norm of 5: clip 1 → a fifth, clip 10 → one."""
    assert clip_coefficient(25.0, 1.0) == 1.0 / (5.0 + 1e-6)
    assert clip_coefficient(25.0, 10.0) == 1.0
