"""What a leader remembers of its decisions: until when, and what ends it. tests/fakes/simulated_cluster.py compares
every decision of every simulated cluster with one that remembers nothing.
"""

from dataclasses import replace

from headway.daemon.coordination.claims import Claims
from headway.daemon.coordination.commands import Transaction
from headway.daemon.coordination.earlier import REPEATED_S, Earlier, Judged
from headway.daemon.records.measurements import ProgressRecord
from headway.daemon.records.records import Phase, PhaseRecord
from headway.daemon.situation.reads import Reads
from headway.daemon.view.job_view import JobView

RUNNING = JobView(name="j", phase=PhaseRecord(phase=Phase.RUNNING))
QUEUED = JobView(name="j")
QUIET = Judged(command=None, deadlines=(7.0,))


def decided(job: JobView, judged: Judged, *, now: float = 0.0, wake_at: float | None = None) -> Earlier:
    """A leader that has decided about one job."""
    earlier = Earlier()
    earlier.remember(job, earlier.basis(job), judged, now=now)
    earlier.decided([job.name], wake_at=wake_at)
    return earlier


def kept(reads: Reads) -> Reads:
    """What was read is still the same."""
    return reads


def knows(earlier: Earlier, job: JobView, *, now: float) -> bool:
    """Whether the judgement still holds."""
    return earlier.judged(job, earlier.basis(job), kept, now=now) is not None


def test_a_judgement_holds_until_a_wait_ends_or_it_is_old() -> None:
    """Its own deadline counts, and without one it is repeated after a while, for the numbers in its sentences."""
    earlier = decided(RUNNING, QUIET)
    assert knows(earlier, RUNNING, now=6.9)
    assert not knows(earlier, RUNNING, now=7.0)
    lasting = decided(RUNNING, replace(QUIET, deadlines=()))
    assert knows(lasting, RUNNING, now=REPEATED_S - 0.1)
    assert not knows(lasting, RUNNING, now=REPEATED_S)


def test_a_job_that_waits_is_judged_again_when_another_ones_time_has_come() -> None:
    """Its sentence names other jobs. A job that runs does not read them."""
    assert not knows(decided(QUEUED, QUIET, wake_at=3.0), QUEUED, now=3.0)
    assert knows(decided(RUNNING, QUIET, wake_at=3.0), RUNNING, now=3.0)


def test_a_record_of_the_job_ends_its_judgement() -> None:
    """A change that decisions read is counted, and progress is another object."""
    earlier = decided(RUNNING, QUIET)
    assert not knows(earlier, replace(RUNNING, num_changes=1), now=1.0)
    progress = ProgressRecord(generation=1, batch=1, loss=1.0, tokens_per_second=1.0)
    assert not knows(earlier, replace(RUNNING, progress=progress), now=1.0)


def test_what_does_something_is_not_remembered() -> None:
    """And of jobs that are gone nothing is kept."""
    assert not knows(decided(RUNNING, replace(QUIET, command=Transaction(job="j", reason="r"))), RUNNING, now=1.0)
    assert not knows(decided(RUNNING, replace(QUIET, takes=frozenset({("n", 0)}))), RUNNING, now=1.0)
    earlier = decided(RUNNING, QUIET)
    earlier.decided([], wake_at=None)
    assert not knows(earlier, RUNNING, now=1.0)


def test_claims_hold_until_their_time_or_the_next_wait_ends() -> None:
    """Equal claims leave judgements as they are, other ones end them; claims with an error are settled each time."""
    earlier = decided(RUNNING, QUIET, wake_at=5.0)
    earlier.settled((1,), Claims(until=4.0), {})
    basis = earlier.basis(RUNNING)
    assert earlier.claims((1,), kept, now=3.9) is not None
    assert earlier.claims((2,), kept, now=3.9) is None
    assert earlier.claims((1,), kept, now=4.0) is None
    earlier.settled((1,), Claims(), {})
    assert earlier.basis(RUNNING) == basis
    assert earlier.claims((1,), kept, now=5.0) is None, "a wait has ended"
    earlier.settled((1,), Claims(by_job={"j": frozenset({("n", 0)})}), {})
    assert earlier.basis(RUNNING) != basis
    earlier.settled((1,), Claims(errors={"j": ValueError()}), {})
    assert earlier.claims((1,), kept, now=1.0) is None
