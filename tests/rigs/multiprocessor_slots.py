"""Cards whose transfers each take some multiprocessors until the other side's transfer runs: who waits for ever?

Each card sends to all others and receives from all others at once, as replicas do that exchange sums. A transfer's
kernel has a block for each of its channels. A block takes a multiprocessor as soon as one is free, in the order of the
launches, and spins there until the block of its channel runs on the other card: more is on its way than fits into the
channel's buffers. A send is launched before the peer hears of it (stream_link.py), so in the worst case all sends of
all cards run before the first receive is launched.
"""

from collections import deque
from itertools import permutations

NUM_SLOTS = 132
"""Multiprocessors of an H100. A block of NCCL's kernel has 640 threads of 96 registers: one fits on each."""
Block = tuple[int, int, int, bool]
"""Sending card, receiving card, channel, and whether it is the sender's."""


def all_exchange(num_cards: int, *, num_channels: int, num_slots: int = NUM_SLOTS) -> bool:
    """Return whether all transfers between all cards end."""
    pairs = list(permutations(range(num_cards), 2))
    waiting: list[deque[Block]] = [deque() for _ in range(num_cards)]
    for is_send in (True, False):
        for source, target in pairs:
            card = source if is_send else target
            waiting[card].extend((source, target, channel, is_send) for channel in range(num_channels))
    running: list[set[Block]] = [set() for _ in range(num_cards)]
    while any(waiting):
        for card in range(num_cards):
            while waiting[card] and len(running[card]) < num_slots:
                running[card].add(waiting[card].popleft())
        met = [block for blocks in running for block in blocks if block[3] and _other(block) in running[block[1]]]
        if not met:
            return False
        for block in met:
            running[block[0]].remove(block)
            running[block[1]].remove(_other(block))
    return True


def _other(block: Block) -> Block:
    source, target, channel, is_send = block
    return source, target, channel, not is_send
