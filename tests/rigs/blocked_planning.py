"""Parts that tests of blocked planning share."""

from headway.daemon.costs.paths import BlockedWay, BlockedWays
from headway.daemon.records.measurements import Port
from headway.daemon.records.records import NodeRecord
from tests.rigs.clusters import node


def ways(*pairs: tuple[str, str]) -> BlockedWays:
    found = (
        BlockedWay(source, target, Port.WORKER, f"{target}:7100", "the connection was refused")
        for source, target in pairs
    )
    return BlockedWays(tuple(sorted(found)))


def names(number: int) -> list[NodeRecord]:
    return [node(f"n{index}") for index in range(number)]
