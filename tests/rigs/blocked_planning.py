"""Parts that tests of blocked planning share."""

from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.plan.paths import BlockedWay, BlockedWays
from tests.rigs.clusters import node


def ways(*pairs: tuple[str, str]) -> BlockedWays:
    found = (
        BlockedWay(source, target, Port.WORKER, f"{target}:7100", "the connection was refused")
        for source, target in pairs
    )
    return BlockedWays(tuple(sorted(found)))


def names(number: int) -> list[NodeRecord]:
    return [node(f"n{index}") for index in range(number)]
