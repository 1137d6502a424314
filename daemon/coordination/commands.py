"""The commands of the coordinator: plain values, carried out by the leader's shell."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.daemon.records.records import CheckpointRecord
from headway.daemon.situation.plan_cache import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Apply all puts and deletes at once if every compared key still has the revision that was read; otherwise nothing.

    The shell adds the comparison with the leader's own key. A failed transaction is dropped: the changed keys are about
    to reach the view, and the coordinator decides again.

    """

    job: str
    reason: str
    """The reason, for the log."""
    compare: dict[str, int] = field(default_factory=dict)
    """Compared keys, each with the revision of its last change; 0: the key must be absent."""
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    leased: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Keys under a lease, each with its value and lifetime in seconds. The shell grants one lease per lifetime.

    These keys are notes: if they do not fit into one transaction, later transactions write the rest
    (transaction_parts.py).

    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Copy a file to a journal part. Both URLs may be relative, as the job's `checkpoint_dir`."""

    source: str
    target: str
    is_inherited: bool = False
    """True if it is a part of the job from whose checkpoint this job started. The job goes on without such a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Write a checkpoint's manifest to its folder; once the manifest is durable, run `then`.

    `url` may be relative, as the job's `checkpoint_dir`: resolve it as the daemons do.
    """

    job: str
    url: str
    manifest: bytes
    then: Transaction
    parts: tuple[CopyPart, ...] = ()
    """Journal parts that the manifest names and that do not exist yet: they are copied first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Delete the folders of old checkpoints, the manifest of each first; then run `then`.

    `urls` may be relative, as the job's `checkpoint_dir`.
    """

    job: str
    urls: tuple[str, ...]
    then: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Set a damaged checkpoint aside and read older manifests, newest first; then run `then` with the first sound one.

    `url` and `older` may be relative, as the job's `checkpoint_dir`.
    """

    job: str
    url: str
    reason: str
    older: tuple[str, ...]
    then: Callable[[CheckpointRecord | None], Transaction] = field(compare=False)
    """None: no older one can be read."""


Command = Transaction | WriteManifest | DeleteCheckpoints | SetAside


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenJob:
    """A job about which the coordinator could not decide."""

    job: str
    reason: str
    """The error in one line."""
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The commands to carry out now, and the time of the next decision even if nothing happens."""

    commands: tuple[Command, ...] = ()
    wake_at: float | None = None
    """The next deadline or settle time, by the clock of `now`; None: nothing is pending."""
    missing: tuple[PlanRequest, ...] = ()
    """Plans that decisions need and that do not exist yet, the most urgent first."""
    stale: tuple[PlanRequest, ...] = ()
    """Plans that were used although measurements have changed since."""
    broken: tuple[BrokenJob, ...] = ()
    """Jobs about which no decision was possible because of an unexpected error."""
