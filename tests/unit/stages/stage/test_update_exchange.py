"""Shares of updates between replicas: whose is missing, whose comes too early, and when all of them may be taken."""

import pytest
import torch
from torch import Tensor

from headway.stages.device.cpu import Held
from headway.stages.stage.replicas import UpdateExchange
from headway.stages.update_shares import UpdateShares

SHARES = UpdateShares(owners=(0, 1, 0), num_elements=(5, 3, 0), dtype=torch.float32)
"""Three replicas, of which the last owns no matrix."""


def exchange(replica_index: int = 0) -> UpdateExchange:
    """At boundary 7."""
    return UpdateExchange(SHARES, replica_index=replica_index, first_batch=7)


class OnTheWay:
    """A copy to the device that is not done."""

    is_done = False

    def take(self) -> tuple[Tensor, ...]:
        raise AssertionError("nobody may read it")


def held(value: float, length: int) -> Held:
    return Held((torch.full((length,), value),))


def test_an_update_takes_the_shares_of_all_owners() -> None:
    """The own one and the other's, by replica; the one without matrices is not waited for."""
    own = exchange()
    assert own.missing(7) == 0
    own.add_own(7, torch.full((5,), 1.0))
    assert (own.missing(7), own.is_whole(7)) == (1, False)
    own.add(7, 1, held(2.0, 3))
    assert (own.missing(7), own.is_whole(7)) == (None, True)
    shares = own.take(7)
    assert {replica: share.tolist() for replica, share in shares.items()} == {0: [1.0] * 5, 1: [2.0] * 3}
    assert own.is_empty


def test_a_share_that_is_still_being_copied_is_waited_for() -> None:
    """It has arrived, so nobody is missing; but no update may read it."""
    own = exchange()
    own.add_own(7, torch.zeros(5))
    own.add(7, 1, OnTheWay())
    assert (own.missing(7), own.is_whole(7)) == (None, False)


def test_a_replica_without_matrices_takes_what_the_owners_send() -> None:
    """Its own share is nothing, and nobody expects it."""
    own = exchange(replica_index=2)
    own.add_own(7, torch.empty(0))
    assert not own.expects(2, 7)
    for replica, length in ((0, 5), (1, 3)):
        own.add(7, replica, held(0.0, length))
    assert own.is_whole(7)


@pytest.mark.parametrize(("replica", "batch"), [(0, 7), (1, 6), (1, 8), (2, 7), (3, 7)])
def test_what_is_not_the_next_share_is_not_expected(replica: int, batch: int) -> None:
    """The own one, a batch that was, one that is not next, of a replica that owns nothing, of one that is not there."""
    own = exchange()
    assert own.expects(1, 7)
    assert not own.expects(replica, batch)


def test_a_share_may_come_before_the_own_one() -> None:
    """The other is a batch ahead: both batches wait for the own shares, each is taken by itself."""
    own = exchange()
    own.add(7, 1, held(1.0, 3))
    own.add(8, 1, held(2.0, 3))
    assert own.missing(8) == 0
    for batch, value in ((7, 1.0), (8, 2.0)):
        own.add_own(batch, torch.zeros(5))
        taken: dict[int, Tensor] = own.take(batch)
        assert taken[1].tolist() == [value] * 3
