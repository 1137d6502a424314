"""Which nodes cannot talk: only what the present processes found of one another counts."""

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.plan.paths import BlockedWay, BlockedWays, pair_of
from tests.rigs.blocked_ways import REFUSED, Scene, fact, node


def test_one_direction_that_is_blocked_blocks_the_pair() -> None:
    scene = Scene("a", "b", "c")
    scene.found("b", fact("a"), fact("c", ""))
    assert scene.view.blocked.ways == (BlockedWay("b", "a", Port.WORKER, "a:7100", REFUSED),)
    assert scene.view.blocked.pairs == {pair_of("b", "a")} == {("a", "b")}
    assert str(scene.view.blocked) == "b cannot reach the worker port of a at a:7100 (connection refused)"


def test_what_a_process_found_that_is_gone_does_not_count() -> None:
    """Neither of the process that dialled, nor of the one that was dialled; nor a record that went with its lease."""
    scene = Scene("a", "b")
    scene.found("a", fact("b", incarnation="b-0"))
    assert not scene.view.blocked
    scene.found("a", fact("b"), incarnation="a-0")
    assert not scene.view.blocked
    scene.found("a", fact("b"))
    assert scene.view.blocked
    scene.put(Keys.reach("a"), None)
    assert not scene.view.blocked


def test_a_healed_way_is_open_again() -> None:
    scene = Scene("a", "b")
    scene.found("a", fact("b"))
    scene.found("a", fact("b", ""))
    assert not scene.view.blocked


def test_only_ways_among_some_nodes_are_named_and_of_many_the_number() -> None:
    names = [f"n{index}" for index in range(8)]
    scene = Scene(*names)
    scene.found("n0", *(fact(name) for name in names[1:]))
    assert scene.view.blocked.among(["n0", "n3", "n4"]).pairs == {("n0", "n3"), ("n0", "n4")}
    assert scene.view.blocked.between([("n0", "n7")]).pairs == {("n0", "n7")}
    assert str(scene.view.blocked).endswith("; 3 more ways are blocked")


def test_a_node_of_before_says_nothing_of_its_workers_ports() -> None:
    """Its record lacks the field: it is read, and the pair is neither proven nor blocked."""
    raw = encode(node("a")).replace(b',"workers":[]', b"")
    assert b"workers" not in raw
    assert decode(raw, NodeRecord).workers == ()


def daemon_way(source: str, target: str) -> BlockedWay:
    return BlockedWay(source, target, Port.DAEMON, f"{target}:7001", REFUSED)


def test_a_file_is_fetched_by_way_of_a_node_that_reaches_both() -> None:
    """a does not reach b's daemon; c reaches it, d does not, and a does not reach e. Workers' ports do not matter."""
    ways = BlockedWays(tuple(sorted([daemon_way("a", "b"), daemon_way("d", "b"), daemon_way("a", "e")])))
    assert ways.cannot_ask("a", "b")
    assert not ways.cannot_ask("b", "a")
    assert ways.relays("a", ["b"], "abcde") == ("c",)
    assert not BlockedWays((BlockedWay("a", "b", Port.WORKER, "b:7100", REFUSED),)).cannot_ask("a", "b")
