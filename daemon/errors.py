"""Errors by who is to blame. Adapters translate grpc, etcd and file errors at the edge with `raise … from`."""

from dataclasses import dataclass

EXIT_CONFIG = 2
EXIT_UNREACHABLE = 3
EXIT_JOB_FAILED = 4
MAX_REASON_CHARACTERS = 300


@dataclass
class ConfigError(Exception):
    """The user's: a file, a flag or a name is wrong. One line that says what, where, and what to do."""

    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class InvariantLostError(ConfigError):
    """A daemon cannot keep one of its invariants, and ends. Nothing else ends a daemon that has joined:

    - another daemon has taken the node's name (node/registration.py),
    - another daemon has the lock of its state folder (node/memory.py),
    - etcd refuses this daemon's user or certificate, and goes on doing so (coordination/cluster_watch.py).
    """


@dataclass
class StoreError(Exception):
    """etcd said no, or nothing. `target` is its address or a key."""

    target: str
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


class StoreUnreachableError(StoreError):
    """No etcd answered within the deadline."""


class LeaseLostError(StoreError):
    """The lease is gone: everything registered under it too."""


class ConflictError(StoreError):
    """A compared revision had moved on: somebody else decided first."""


class CompactedError(StoreError):
    """The revision to resume a watch from was compacted away: list again."""


@dataclass
class RecoveryError(Exception):
    """State that should have been there is not: `item` names it."""

    item: str
    reason: str

    def __str__(self) -> str:
        return f"{self.item}: {self.reason}"


class NoAccessError(RecoveryError):
    """This node lacks the credentials or the package that a file system asks for; another node may have them."""


class StorageAwayError(RecoveryError):
    """A file system does not answer, or lacks what was read there before: an outage, which nobody is charged with."""


class DamagedCopyError(RecoveryError):
    """A copy is not what it was registered as: another attempt would find the same."""


@dataclass
class JobFailedError(Exception):
    """A job ended without finishing: `phase` says how, `last_line` is its traceback's, `where` names the whole text."""

    job: str
    phase: str
    reason: str
    last_line: str = ""
    where: str = ""

    def __str__(self) -> str:
        parts = [f"{self.job}: {self.phase}", self.reason, self.last_line]
        sentence = ": ".join(part for part in parts if part)
        return f"{sentence} (see {self.where})" if self.where else sentence


def first_of(error: BaseException) -> BaseException:
    """The first error of a group; any other error itself."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def in_one_line(error: BaseException) -> str:
    """An error that nobody expected, as `Kind: what it says`; of a group, its first one."""
    first = first_of(error)
    return shortened(f"{type(first).__name__}: {first}".rstrip(": "))


def shortened(reason: str) -> str:
    """A reason on one line of at most MAX_REASON_CHARACTERS."""
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[: MAX_REASON_CHARACTERS - 1]}…"
