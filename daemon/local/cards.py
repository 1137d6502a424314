"""Shares out this machine's cards among the nodes of a local cluster."""

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted
from headway.daemon.cluster.records import Device

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DRIVER_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Where none of these is, no process finds a card, and torch need not be asked: its import takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardShare:
    """The cards of one node."""

    cards: tuple[str, ...]
    """Their names for CUDA_VISIBLE_DEVICES."""
    num_sharers: int = 1
    """Number of nodes that have the same card."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which a daemon sees its cards only."""
        return {VISIBLE: ",".join(self.cards)}


def share_cards(cards: Sequence[str], num_nodes: int) -> tuple[CardShare, ...]:
    """Return the share of each node; empty if there are no cards.

    With at least as many cards as nodes, each card has one node. Otherwise each node has one card, and neighbours share
    it. Numbers differ by one at most, and earlier nodes and cards have more.
    """
    if not cards:
        return ()
    if len(cards) >= num_nodes:
        ends = [_dealt(len(cards), num_nodes, index) for index in range(num_nodes + 1)]
        return tuple(CardShare(cards=tuple(cards[ends[at] : ends[at + 1]])) for at in range(num_nodes))
    ends = [_dealt(num_nodes, len(cards), index) for index in range(len(cards) + 1)]
    counts = [ends[at + 1] - ends[at] for at in range(len(cards))]
    return tuple(
        CardShare(cards=(card,), num_sharers=count)
        for card, count in zip(cards, counts, strict=True)
        for _ in range(count)
    )


def free_share(shares: Sequence[CardShare], taken: Container[int]) -> int:
    """Return the number of the first share that no node has. taken: numbers of shares that nodes have.

    Raises ConfigError when each has a node: another node would plan with memory that was promised already.
    """
    for number in range(len(shares)):
        if number not in taken:
            return number
    raise ConfigError(
        f"this machine's cards are dealt out to {len(shares)} nodes; start the cluster for more nodes, "
        "or give the new one devices = cpu",
        "add_node",
    )


def sharing(shares: Sequence[CardShare]) -> str:
    """Return a sentence on nodes that share a card; empty: each card has one node at most."""
    if not any(share.num_sharers > 1 for share in shares):
        return ""
    groups = []
    for card, sharers in groupby(enumerate(shares, 1), key=lambda each: each[1].cards[0]):
        names = [f"node-{number}" for number, _ in sharers]
        groups.append(f"{' and '.join(names)} {'share' if len(names) > 1 else 'has'} card {card}")
    cards = len(groups)
    return (
        f"{counted(cards, 'card')} for {len(shares)} nodes: {'; '.join(groups)}. "
        "Nodes that share a card take turns on it, and each has its part of the card's memory"
    )


def machine_cards(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return this machine's cards under their names for CUDA_VISIBLE_DEVICES, if a daemon here would use them."""
    told = os.environ if environment is None else environment
    if told.get("HEADWAY_DEVICES") == "cpu" or not any(path.exists() for path in _DRIVER_FILES):
        return ()
    import torch

    number = torch.cuda.device_count()
    names = [name.strip() for name in told.get(VISIBLE, "").split(",") if name.strip()]
    return tuple(names[:number]) if names else tuple(map(str, range(number)))


def local_devices() -> tuple[Device, ...]:
    """Return the devices on which a local cluster computes, as far as a job depends on them."""
    if not machine_cards():
        return (Device(kind="cpu"),)
    from headway.daemon.node.hardware import find_devices

    return find_devices("cuda", 0)


def _dealt(number: int, num_parts: int, index: int) -> int:
    """Return how many the first `index` of the parts have together."""
    return index * (number // num_parts) + min(index, number % num_parts)
