"""One reading of all nodes says what each node's record says for itself, for any job."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.records.records import NodeRecord
from headway.daemon.situation.generations_seen import GenerationsSeen

NODE = NodeRecord(
    name="a", incarnation="a-1", address="a:1", host="a", site="", devices=(), memory_bytes=0, arithmetic_class=""
)
JOBS, UIDS = ("j", "jj", "k"), ("", "u", "v")
KEYS = st.sampled_from([*JOBS, *(f"{job}/{uid}" for job in JOBS for uid in UIDS)])


@given(st.lists(st.dictionaries(KEYS, st.integers(1, 9)), max_size=4))
def test_it_is_the_most_that_any_node_says(told: list[dict[str, int]]) -> None:
    """By name, by submission, or by both, on some nodes or none."""
    nodes = [replace(NODE, name=f"n{number}", generations=each) for number, each in enumerate(told)]
    seen = GenerationsSeen(nodes)
    for job in JOBS:
        assert seen.of_name(job) == max((node.generations.get(job, 0) for node in nodes), default=0)
        for uid in UIDS:
            expected = max((node.generation_seen(job, uid) for node in nodes), default=0)
            assert seen.of_submission(job, uid) == expected
