"""What the coordinator wants done: plain values, carried out by the leader's shell."""

from dataclasses import dataclass, field

from headway.daemon.coordination.plan_book import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """All puts and deletes at once, if every compared key still has the revision that was read; else nothing.

    The shell adds the comparison with the leader's own key. A transaction that fails is dropped: the keys that moved
    on are on their way to the view, and the decision is taken anew.
    """

    job: str
    reason: str
    """For the log."""
    compare: dict[str, int] = field(default_factory=dict)
    """Key to the revision of its last change; 0: the key must be absent."""
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    leased: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Key to value and seconds that it lives; the shell grants one lease for all that live as long.

    They are notes: where there are too many for one transaction, the rest follows it (transaction_parts.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Write a checkpoint's manifest to its folder; only when that is durable, run `then`.

    `url` is relative where the job's `checkpoint_dir` is: resolve it as the daemons do.
    """

    job: str
    url: str
    manifest: bytes
    then: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Delete the folders of old checkpoints, each one's manifest first; only then run `then`.

    `urls` are relative where the job's `checkpoint_dir` is.
    """

    job: str
    urls: tuple[str, ...]
    then: Transaction


Command = Transaction | WriteManifest | DeleteCheckpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenJob:
    """A job that could not be decided about."""

    job: str
    reason: str
    """The error in one line."""
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and when to look again even if nothing happens."""

    commands: tuple[Command, ...] = ()
    wake_at: float | None = None
    """By the clock of `now`: the next deadline or settle time; None: none runs."""
    missing: tuple[PlanRequest, ...] = ()
    """Plans without which no more can be decided, the most urgent first."""
    stale: tuple[PlanRequest, ...] = ()
    """Plans that were used, though measurements have changed since."""
    broken: tuple[BrokenJob, ...] = ()
    """Jobs that could not be decided about, because of an error that nobody expected."""
