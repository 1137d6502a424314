"""Jobs that ended long ago are forgotten, the first to end first, and nothing that is left to do is lost."""

from dataclasses import replace

from headway.daemon.coordination.coordinator import decide
from headway.daemon.coordination.retention import MOST_ENDED, retire_one
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.view.cluster_view import ClusterView
from tests.fakes.simulated_cluster import small_spec


class Ended:
    """A view of jobs that ended one after the other."""

    def __init__(self, *phases: Phase) -> None:
        self.view = ClusterView()
        self.view.set_in_sight(True, now=-1000.0)
        self.revision = 0
        for number, phase in enumerate(phases):
            self.put(Keys.of(f"j{number}", "spec"), SpecRecord(spec=small_spec(f"j{number}"), uid=f"u{number}"))
            self.put(Keys.of(f"j{number}", "phase"), PhaseRecord(phase=phase))

    def put(self, key: str, record: object) -> None:
        """Write a record."""
        self.apply(key, encode(record))

    def apply(self, key: str, value: bytes | None) -> None:
        """Write or delete a value."""
        self.revision += 1
        self.view.apply(key, value, mod_revision=self.revision, create_revision=self.revision)

    def retired(self, most: int = 2) -> str:
        """The job that goes next; empty: none."""
        command = retire_one(self.view, most=most)
        return command.job if command is not None else ""


def test_the_first_that_ended_goes_when_there_are_too_many() -> None:
    """By the order of their ends, not of their submissions; jobs that run or pause are not counted."""
    place = Ended(Phase.FINISHED, Phase.RUNNING, Phase.CANCELLED, Phase.PAUSED, Phase.FINISHED)
    place.put(Keys.of("j0", "phase"), PhaseRecord(phase=Phase.FINISHED, reason="the last to end"))
    assert place.retired() == "j2"
    assert place.retired(most=3) == ""


def test_failed_jobs_have_a_limit_of_their_own() -> None:
    """One that may be resumed does not go for others that ended well."""
    assert Ended(Phase.FAILED, *[Phase.FINISHED] * 2, Phase.FAILED).retired() == ""
    assert Ended(*[Phase.FAILED] * 3).retired() == "j0"


def test_what_is_left_to_do_is_done_first() -> None:
    """An old checkpoint is to be deleted, or a record cannot be read: the job stays, and another goes."""
    place = Ended(*[Phase.FINISHED] * 5)
    place.put(Keys.of("j0", "checkpoint"), CheckpointRecord(timeline=1, boundary=1, url="u", dropped=("old",)))
    place.apply(Keys.of("j1", "plan"), b"garbage")
    assert place.retired() == "j2"


def test_a_decision_forgets_one_job_after_another_until_the_limit() -> None:
    """Each transaction compares the phase, deletes everything below the job, and the view has none of it after."""
    place = Ended(*[Phase.FINISHED] * (MOST_ENDED + 2))
    for name in ("j0", "j1"):
        [command] = decide(place.view, now=100.0).commands
        assert (command.job, command.deletes) == (name, (Keys.job(name),))  # type: ignore[union-attr]
        for key in [key for key in place.view.revisions if key.startswith(Keys.job(name))]:
            place.apply(key, None)
        assert name not in place.view.jobs
    assert decide(place.view, now=100.0).commands == ()


def test_a_job_stays_in_a_view_until_its_last_key_is_gone() -> None:
    """Keys may go in any order, and names that begin alike are different jobs."""
    place = Ended(Phase.FINISHED)
    place.put(Keys.of("j00", "spec"), SpecRecord(spec=replace(small_spec("j00"))))
    place.apply(Keys.of("j0", "spec"), None)
    assert "j0" in place.view.jobs
    place.apply(Keys.of("j0", "phase"), None)
    assert set(place.view.jobs) == {"j00"}
