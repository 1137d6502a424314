"""What a node remembers of generations, across restarts and for how many jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.daemon.node.memory import NUM_JOBS_REMEMBERED, NUM_SUBMISSIONS_REMEMBERED, NodeMemory
from headway.daemon.records import seen_key


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    memory = NodeMemory(tmp_path)
    memory.open()
    yield memory
    memory.close()


def saw(memory: NodeMemory, job: str, uid: str, generation: int, **others: int) -> bool:
    """etcd has this job, and others by name."""
    return memory.saw_generations({job: generation, seen_key(job, uid): generation} | others)


def test_only_a_higher_generation_is_news_and_it_lasts(memory: NodeMemory, tmp_path: Path) -> None:
    """3, then 2 of the same job: nothing new. The next daemon on this folder knows 3."""
    assert saw(memory, "demo", "u", 3)
    assert not saw(memory, "demo", "u", 2)
    memory.close()
    again = NodeMemory(tmp_path)
    again.open()
    assert again.generations == {"demo": 3, "demo/u": 3}
    again.close()


def test_the_oldest_of_many_jobs_are_forgotten_with_their_submissions(memory: NodeMemory) -> None:
    """Jobs come and go, one stays in etcd all the time: the newest and that one are remembered, whole."""
    saw(memory, "stays", "u", 7)
    for number in range(2 * NUM_JOBS_REMEMBERED):
        saw(memory, f"job-{number}", "u", 1, **{"stays": 7, "stays/u": 7})
    assert memory.generations["stays/u"] == memory.generations["stays"] == 7
    newest = range(NUM_JOBS_REMEMBERED, 2 * NUM_JOBS_REMEMBERED)
    assert memory.generations.keys() == {
        "stays", "stays/u", *(f"job-{n}" for n in newest), *(f"job-{n}/u" for n in newest)
    }  # fmt: skip


def test_of_one_name_the_newest_submissions_are_remembered(memory: NodeMemory, tmp_path: Path) -> None:
    """A name is submitted again and again, also after a restart: the last few are known, and the highest of all."""
    num = 3 * NUM_SUBMISSIONS_REMEMBERED
    for number in range(num):
        saw(memory, "demo", f"u{number}", number + 1)
        if number == num - 2:
            memory.close()
            memory = NodeMemory(tmp_path)
            memory.open()
    kept = range(num - NUM_SUBMISSIONS_REMEMBERED, num)
    assert memory.generations == {"demo": num} | {f"demo/u{number}": number + 1 for number in kept}
    memory.close()
