"""A worker's process remembers generations over all the jobs that it serves."""

from headway.stages.ids import Generation
from headway.stages.links.known_generations import MAX_JOBS, NEVER_MET, KnownGenerations


def test_the_newest_generation_of_a_job_counts() -> None:
    known = KnownGenerations()
    assert known.newest("j") == NEVER_MET
    for generation in (3, 7, 5):
        known.meet("j", Generation(generation))
    assert known.newest("j") == 7


def test_of_many_jobs_the_last_ones_are_remembered() -> None:
    """One job goes on while ten thousand others come and go."""
    known = KnownGenerations()
    for number in range(10_000):
        known.meet("long", Generation(number))
        known.meet(f"short-{number}", Generation(1))
    assert known.newest("long") == 9_999
    assert known.newest("short-9999") == 1
    assert known.newest("short-0") == NEVER_MET
    assert sum(f"short-{number}" in known for number in range(10_000)) == MAX_JOBS - 1
