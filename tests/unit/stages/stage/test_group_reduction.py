"""Slices of the groups' sums, whoever holds which groups and whatever arrives first."""

from itertools import permutations
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.stages.device.cpu import Held
from headway.stages.links.frame_contract import SIBLING_KINDS, FrameContract, num_elements
from headway.stages.links.link import FrameKind
from headway.stages.stage.batch_gradients import GradientSums
from headway.stages.stage.replicas import Arrivals, GroupReduction
from headway.stages.sums import slice_bounds
from headway.stages.update_shares import UpdateShares
from tests.rigs.pipeline import MODEL, with_train

SHAPES = [torch.Size((3, 5)), torch.Size((7,)), torch.Size((2, 2, 2))]


def gradients(microbatch: int) -> list[Tensor]:
    """Of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(microbatch)
    return [
        torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 4, shape, generator=generator)
        for shape in SHAPES
    ]


def alone(num_microbatches: int, num_groups: int) -> list[Tensor]:
    """What a worker comes to that has the stage to itself."""
    sums = GradientSums(num_microbatches=num_microbatches, num_groups=num_groups)
    for i in range(num_microbatches):
        sums.add(i, gradients(i))
    return sums.reduce()


class Replica:
    """One replica, with the sums of its groups."""

    def __init__(self, held: list[tuple[int, ...]], index: int, num_microbatches: int, num_groups: int) -> None:
        self.reduction = GroupReduction(
            SHAPES,
            held,
            replica_index=index,
            num_microbatches=num_microbatches,
            first_batch=0,
            device=torch.device("cpu"),
        )
        self.index = index
        sums = GradientSums(num_microbatches=num_microbatches, num_groups=num_groups, is_reduced_here=False)
        for i in range(num_microbatches):
            if i % num_groups in held[index]:
                sums.add(i, gradients(i))
        self.sums = sums.take()


@given(data=st.data(), num_microbatches=st.integers(1, 11))
def test_any_order_of_arrival_gives_the_sums_in_order_of_the_group(data: st.DataObject, num_microbatches: int) -> None:
    """Up to four replicas with any groups, messages in any order between them → the bits of one worker, on each."""
    num_groups = data.draw(st.integers(1, min(5, num_microbatches)))
    holders = [data.draw(st.integers(0, 3)) for _ in range(num_groups)]
    held = sorted(tuple(k for k in range(num_groups) if holders[k] == holder) for holder in set(holders))
    replicas = [Replica(held, index, num_microbatches, num_groups) for index in range(len(held))]
    expected = alone(num_microbatches, num_groups)
    lines: dict[tuple[int, int], list[tuple[str, Tensor]]] = {pair: [] for pair in permutations(range(len(held)), 2)}
    to_begin = list(range(len(held)))
    finished: dict[int, list[Tensor]] = {}

    def go_on(replica: Replica) -> None:
        mean = replica.reduction.reduce_own(0)
        if mean is not None:
            for other in range(len(held)):
                if other != replica.index:
                    lines[replica.index, other].append(("reduced", mean))
        whole = replica.reduction.finish(0)
        if whole is not None:
            assert replica.index not in finished
            finished[replica.index] = whole

    while to_begin or any(lines.values()):
        waiting = [pair for pair, line in lines.items() if line]
        choice = data.draw(st.sampled_from([*to_begin, *waiting]))
        if isinstance(choice, int):
            to_begin.remove(choice)
            replica = replicas[choice]
            for owner, part in replica.reduction.contribute(0, replica.sums).items():
                lines[choice, owner].append(("sums", part))
        else:
            sender, listener = cast(tuple[int, int], choice)
            replica = replicas[listener]
            kind, tensor = lines[sender, listener].pop(0)
            if kind == "sums":
                assert replica.reduction.expects_sums(sender, 0)
                replica.reduction.add_sums(0, sender, Held((tensor,)))
            else:
                assert replica.reduction.expects_reduced(sender, 0)
                replica.reduction.add_reduced(0, sender, Held((tensor,)))
        go_on(replica)
    assert sorted(finished) == list(range(len(held)))
    for whole in finished.values():
        assert all(torch.equal(one, other) for one, other in zip(whole, expected, strict=True))
    assert all(replica.reduction.is_empty for replica in replicas)


@given(num_elements=st.integers(0, 100), num_replicas=st.integers(1, 7))
def test_slices_cover_everything_once(num_elements: int, num_replicas: int) -> None:
    """Whatever is to be cut → as many slices as replicas, side by side, none longer than another by more than one."""
    bounds = slice_bounds(num_elements, num_replicas)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(num_elements))
    lengths = {stop - start for start, stop in bounds}
    assert len(bounds) == num_replicas
    assert max(lengths) - min(lengths) <= 1


def test_who_is_late_is_named() -> None:
    """First whoever owes sums, then whoever owes a slice; nobody once all is there."""
    held: list[tuple[int, ...]] = [(0,), (1,), (2,)]
    replica, *others = (Replica(held, index, 3, 3) for index in range(3))
    parts = [other.reduction.contribute(0, other.sums)[0] for other in others]
    assert replica.reduction.missing(0) == 1
    replica.reduction.add_sums(0, 1, Held((parts[0],)))
    assert replica.reduction.missing(0) == 2
    assert not replica.reduction.expects_sums(1, 0)
    assert not replica.reduction.expects_reduced(1, 0), "before it has contributed itself"
    replica.reduction.contribute(0, replica.sums)
    replica.reduction.add_sums(0, 2, Held((parts[1],)))
    assert replica.reduction.reduce_own(0) is not None
    assert replica.reduction.reduce_own(0) is None
    assert replica.reduction.missing(0) == 1
    for index in (1, 2):
        start, stop = slice_bounds(30, 3)[index]
        replica.reduction.add_reduced(0, index, Held((torch.zeros(stop - start),)))
    assert replica.reduction.missing(0) is None
    assert replica.reduction.missing(1) == 1
    assert replica.reduction.finish(0) is not None


@pytest.mark.parametrize("own", [0, 1])
def test_both_ends_of_a_sibling_link_agree_on_its_frames(own: int) -> None:
    """What one end may say is what the other expects, to the element; both allow as many bytes under way."""
    train = with_train(microbatches=7, reduction_groups=3, eval_every=1, eval_patience=1)
    layers, held = ("block.2", "head"), ((0, 2), (1,))
    shares = UpdateShares(owners=(0, 1), num_elements=(6, 4), dtype=torch.bfloat16)
    ends = [
        FrameContract.between_replicas(
            MODEL, train, layers=layers, replica_groups=held, own=k, sibling=1 - k, update_shares=shares
        )
        for k in (own, 1 - own)
    ]
    assert ends[0].forms == ends[1].sent_forms
    assert ends[0].max_unacknowledged_bytes == ends[1].max_unacknowledged_bytes
    at_lead = ends[own].forms
    at_other = ends[1 - own].forms
    assert at_lead.keys() | at_other.keys() == SIBLING_KINDS - {FrameKind.STOP}, "the last stage chooses no stop"
    total = num_elements(layers, MODEL)
    assert at_lead[FrameKind.SUMS][0].shape == (1, total // 2)
    assert at_other[FrameKind.SUMS][0].shape == (2, total - total // 2)
    assert at_lead[FrameKind.LOSSES][0].shape == (4,), "two of held-out microbatches"
    of_updates = [at[FrameKind.UPDATE_SHARE][0] for at in (at_lead, at_other)]
    assert [(form.dtype, form.shape) for form in of_updates] == [(torch.bfloat16, (4,)), (torch.bfloat16, (6,))]
    assert FrameKind.LOSSES not in at_other
    assert FrameKind.NORM_TOTAL not in at_lead
    assert ends[0].max_unacknowledged_bytes >= 3 * 4 * (2 * (total - total // 2) + total)


def test_batches_are_reduced_in_order() -> None:
    """The copies of batch 1 are seen to be done before those of batch 0 → batch 1 waits until batch 0 is reduced."""
    held: list[tuple[int, ...]] = [(0,), (1,)]
    replica, other = (Replica(held, index, 4, 2) for index in (0, 1))
    for batch in (0, 1):
        replica.reduction.contribute(batch, replica.sums)
        replica.reduction.add_sums(batch, 1, Held((other.reduction.contribute(batch, other.sums)[0],)))
    assert replica.reduction.reduce_own(1) is None
    for batch in (0, 1):
        mean = replica.reduction.reduce_own(batch)
        assert mean is not None
        replica.reduction.add_reduced(batch, 1, Held((torch.zeros(sum(map(torch.Size.numel, SHAPES)) - len(mean)),)))
    assert replica.reduction.finish(1) is None
    assert replica.reduction.finish(0) is not None
    assert replica.reduction.finish(1) is not None


class OnTheWay:
    """A copy to the device that is not done."""

    is_done = False

    def take(self) -> tuple[Tensor, ...]:
        raise AssertionError("nobody may read it")


def test_a_copy_that_is_not_done_is_waited_for() -> None:
    """It has arrived, so nobody is missing; but nobody may read it."""
    arrivals = Arrivals((0, 1), first_batch=7)
    arrivals.add(0, 7, Held((torch.zeros(5),)))
    assert (arrivals.missing(7), arrivals.missing(7, besides=1), arrivals.is_whole(7)) == (1, None, False)
    arrivals.add(1, 7, OnTheWay())
    assert (arrivals.missing(7), arrivals.is_whole(7)) == (None, False)


def test_a_sender_may_be_ahead_and_each_batch_is_taken_by_itself() -> None:
    """Only its next batch is expected of it, and nothing of a stranger."""
    arrivals = Arrivals((0, 1), first_batch=7)
    assert [arrivals.expects(*place) for place in ((1, 7), (1, 6), (1, 8), (2, 7))] == [True, False, False, False]
    for batch in (7, 8):
        arrivals.add(1, batch, Held((torch.tensor(batch),)))
    for batch in (7, 8):
        assert arrivals.missing(batch) == 0
        arrivals.add(0, batch, Held((torch.tensor(0),)))
        assert arrivals.is_whole(batch)
        assert {sender: int(tensor) for sender, tensor in arrivals.take(batch).items()} == {0: 0, 1: batch}
    assert arrivals.is_empty
