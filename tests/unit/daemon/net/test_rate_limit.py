"""A node sends files for which nobody waits within its limit, and counts all of them."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.net.rate_limit import BYTES_PER_MBIT, OutgoingTransfers, TokenBucket, TransferKind

RATE, BURST = 1000.0, 100.0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400)), min_size=1, max_size=30))
def test_no_stretch_of_time_has_more_than_its_rate_and_a_burst(wishes: list[tuple[float, int]]) -> None:
    """Any pauses and sizes, each sent when it may → between any two sends no more than rate × time + burst passes."""
    bucket, now = TokenBucket(bytes_per_s=RATE, burst_bytes=BURST, now=0.0), 0.0
    sends: list[tuple[float, int]] = []
    for pause_s, num_bytes in wishes:
        now += pause_s
        now += bucket.take(num_bytes, now)
        sends.append((now, num_bytes))
    for first, (began, _) in enumerate(sends):
        for ended, total in (
            (sends[last][0], sum(num_bytes for _, num_bytes in sends[first : last + 1]))
            for last in range(first, len(sends))
        ):
            assert total <= RATE * (ended - began) + BURST + sends[first][1] + 1e-6


def test_a_line_is_used_to_the_full() -> None:
    """Who always sends as soon as he may gets the rate, and waits are in the order of asking."""
    bucket = TokenBucket(bytes_per_s=RATE, burst_bytes=BURST, now=5.0)
    assert bucket.take(100, 5.0) == 0.0
    assert bucket.take(500, 5.0) == pytest.approx(0.5)
    assert bucket.take(500, 5.0) == pytest.approx(1.0)
    assert bucket.take(500, 6.0) == pytest.approx(0.5)
    assert bucket.take(100, 1000.0) == 0.0, "a pause is worth a burst"
    assert bucket.take(1, 1000.0) == pytest.approx(0.001), "and no more"


async def chunks(num_bytes: int, chunk_bytes: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, num_bytes, chunk_bytes):
        yield bytes(range(256)) * (min(chunk_bytes, num_bytes - start) // 256)


async def received(outgoing: OutgoingTransfers, kind: TransferKind, num_bytes: int) -> tuple[bytes, int, float]:
    """(all of it, the largest piece, seconds)"""
    began = time.monotonic()
    pieces = [piece async for piece in outgoing.send(kind, chunks(num_bytes))]
    return b"".join(pieces), max(map(len, pieces)), time.monotonic() - began


async def test_two_copies_share_the_limit_and_a_worker_does_not_wait() -> None:
    """16 Mbit/s: two copies of 512 KiB at once take half a second, in small pieces; a recovery beside them, no time."""
    outgoing = OutgoingTransfers(16.0)
    num_bytes = 512 << 10
    copies = [asyncio.create_task(received(outgoing, TransferKind.COPY, num_bytes)) for _ in range(2)]
    await asyncio.sleep(0)
    urgent = await received(outgoing, TransferKind.RECOVERY, 8 << 20)
    assert not any(copy.done() for copy in copies)
    assert urgent[1] == 1 << 20
    for copy in copies:
        content, largest, _ = await copy
        assert content == bytes(range(256)) * (num_bytes // 256)
        assert largest <= 16 * BYTES_PER_MBIT // 10
    expected_s = (2 * num_bytes - 2 * 16 * BYTES_PER_MBIT // 10) / (16 * BYTES_PER_MBIT)
    assert max([(await copy)[2] for copy in copies]) >= expected_s
    sent = outgoing.sent
    assert sent[TransferKind.COPY].num_bytes == 2 * num_bytes
    assert sent[TransferKind.RECOVERY].num_bytes == 8 << 20
    assert 0 < sent[TransferKind.COPY].held_s <= sent[TransferKind.COPY].seconds + 0.1
    assert sent[TransferKind.RECOVERY].held_s == 0


async def test_without_a_limit_nothing_is_held() -> None:
    """The chunks go as they come, and are counted all the same."""
    outgoing = OutgoingTransfers()
    content, largest, _ = await received(outgoing, TransferKind.COPY, 4 << 20)
    assert (len(content), largest) == (4 << 20, 1 << 20)
    assert outgoing.sent[TransferKind.COPY].held_s == 0
    assert outgoing.sent[TransferKind.COPY].num_bytes == 4 << 20


def test_a_checkpoint_is_held_until_a_stop_waits_for_it() -> None:
    """8 Mbit/s: the first 300 KB take a good fifth of a second; then a stop waits, and a hundred MB take none."""
    outgoing, is_awaited = OutgoingTransfers(8.0), False
    began = time.monotonic()
    with outgoing.checkpointing(lambda: is_awaited) as before:
        for _ in range(3):
            before(100_000)
        held_s = time.monotonic() - began
        is_awaited = True
        before(100_000_000)
    assert held_s >= 0.19
    assert time.monotonic() - began < held_s + 50.0
    assert outgoing.sent[TransferKind.CHECKPOINT].num_bytes == 100_300_000
