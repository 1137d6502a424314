"""Transfers between all cards of a stage: they must not fill the cards and wait for each other."""

import pytest

from headway.daemon.plan.devices import FIXED_BYTES
from headway.stages.links.nccl import MAX_CTAS
from tests.rigs.multiprocessor_slots import NUM_SLOTS, all_exchange

NCCLS_OWN = 32
"""Channels that NCCL takes between two H100 by itself."""
MIB = 1 << 20
BUFFER_BYTES = 4 * MIB + 512 * 8 * 8 * 16 + 640 * 120 * 8 * 8
"""Of a channel at the end that receives, for NCCL's three protocols: NCCL_BUFFSIZE, and src/include/device.h."""
CONTEXT_BYTES = 544 * MIB
"""CUDA's context and cuBLAS, which are in the reserve too."""


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 6, 8, 16, 33])
def test_replicas_exchange_with_todays_blocks(num_replicas: int) -> None:
    """All at once, in the worst order of launches."""
    assert all_exchange(num_replicas, num_channels=MAX_CTAS)


def test_nccls_own_number_of_blocks_stops_six_replicas() -> None:
    """Five sends of 32 blocks want 160 of 132 places: no receive runs. Five replicas just get through."""
    assert all_exchange(5, num_channels=NCCLS_OWN)
    assert not all_exchange(6, num_channels=NCCLS_OWN)


def test_the_limit_is_that_of_the_sends_alone() -> None:
    """As many replicas as fill an H100 with sends; the documented number."""
    limit = NUM_SLOTS // MAX_CTAS + 1
    assert limit == 34
    assert all_exchange(limit - 1, num_channels=MAX_CTAS)
    assert not all_exchange(limit, num_channels=MAX_CTAS)


@pytest.mark.parametrize(("num_channels", "is_room"), [(MAX_CTAS, True), (NCCLS_OWN, False)])
def test_the_reserve_of_a_card_has_the_buffers_of_twelve_replicas(num_channels: int, is_room: bool) -> None:
    """A worker receives from eleven others and from a neighbour on each side. The reserve is one for all stages: what
    is planned on a card is the same with and without replicas.
    """
    num_received_from = 11 + 2
    buffers = num_received_from * num_channels * BUFFER_BYTES
    assert (CONTEXT_BYTES + buffers <= FIXED_BYTES) is is_room
