"""One reading of all nodes says what each node's record says for itself, for any job."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.records.records import NodeRecord
from headway.daemon.view.cluster_view import GenerationsSeen

NODE = NodeRecord(
    name="a", incarnation="a-1", address="a:1", host="a", site="", devices=(), memory_bytes=0, arithmetic_class=""
)
JOBS, UIDS = ("j", "jj", "k"), ("", "u", "v")
KEYS = st.sampled_from([*JOBS, *(f"{job}/{uid}" for job in JOBS for uid in UIDS)])


@given(st.lists(st.dictionaries(KEYS, st.integers(1, 9)), max_size=4))
def test_it_is_the_most_that_any_node_says(told: list[dict[str, int]]) -> None:
    """By name, by submission, or by both, on some nodes or none."""
    nodes = [replace(NODE, name=f"n{number}", generations=each) for number, each in enumerate(told)]
    assert_says_the_same(GenerationsSeen(nodes), nodes)


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.dictionaries(KEYS, st.integers(1, 9))), max_size=8))
def test_it_follows_nodes_that_come_and_go(changes: list[tuple[int, dict[str, int] | None]]) -> None:
    """After each new record, and each that is gone, it says what one says that reads them all. It tells whether any
    answer has changed."""
    seen, nodes = GenerationsSeen(), dict[int, NodeRecord]()
    for number, told in changes:
        before, known = nodes.pop(number, None), answers(seen)
        after = replace(NODE, name=f"n{number}", generations=told) if told is not None else None
        if after is not None:
            nodes[number] = after
        may_differ = seen.replace(before, after)
        assert may_differ or answers(seen) == known
        assert_says_the_same(seen, list(nodes.values()))
    seen.clear()
    assert_says_the_same(seen, [])


def answers(seen: GenerationsSeen) -> list[int]:
    """Everything that can be asked."""
    return [*map(seen.of_name, JOBS), *(seen.of_submission(job, uid) for job in JOBS for uid in UIDS)]


def assert_says_the_same(seen: GenerationsSeen, nodes: list[NodeRecord]) -> None:
    """As the nodes' records."""
    for job in JOBS:
        assert seen.of_name(job) == max((node.generations.get(job, 0) for node in nodes), default=0)
        for uid in UIDS:
            expected = max((node.generation_seen(job, uid) for node in nodes), default=0)
            assert seen.of_submission(job, uid) == expected
