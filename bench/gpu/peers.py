"""Bytes a second of plain copies between every two cards, and between each card and pinned memory of the host.

peer_gb_s_least: of the slowest way between two cards. The JSON has the matrix of all ways.
"""

from itertools import permutations

import torch
from torch import Tensor

from gpu.kernels import seconds_of
from gpu.probe import Parts, absent
from gpu.sizes import num_cards

NUM_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
HOST = "cpu"


def tensor_on(device: str, num_bytes: int) -> Tensor:
    """Return bytes there; those of the host are pinned where cards are."""
    is_pinned = device == HOST and torch.cuda.is_available()
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def gb_s(source: str, target: str, num_bytes: int) -> float:
    """Return the 10⁹ bytes a second of a copy."""
    one, other = (tensor_on(device, num_bytes) for device in (source, target))

    def copy() -> None:
        other.copy_(one, non_blocking=True)
        for device in {source, target} - {HOST}:
            torch.cuda.synchronize(device)

    return round(num_bytes / seconds_of(copy, HOST) / 1e9, 2)


def measure(kind: str) -> Parts:
    """All ways."""
    num_bytes, cards = NUM_BYTES[kind], [f"cuda:{index}" for index in range(num_cards(kind))]
    ways = [(HOST, card) for card in cards] + [(card, HOST) for card in cards] or [(HOST, HOST)]
    of_host = {f"{one} to {other}": gb_s(one, other, num_bytes) for one, other in ways}
    yield {"host_gb_s_least": min(of_host.values()), "host_gb_s": of_host}
    if len(cards) < 2:
        yield absent(f"needs 2 cards; here: {len(cards)}", "peer_gb_s_least")
        return
    of_cards = {f"{one} to {other}": gb_s(one, other, num_bytes) for one, other in permutations(cards, 2)}
    can = {f"{one} to {other}": torch.cuda.can_device_access_peer(one, other) for one, other in permutations(cards, 2)}
    yield {"peer_gb_s_least": min(of_cards.values()), "peer_gb_s": of_cards, "peer_access": can}
