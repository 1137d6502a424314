"""Errors by cause. Adapters translate grpc, etcd and file errors at the edge with `raise … from`."""

from dataclasses import dataclass

EXIT_CONFIG = 2
EXIT_UNREACHABLE = 3
EXIT_JOB_FAILED = 4
MAX_REASON_CHARACTERS = 300


@dataclass
class ConfigError(Exception):
    """A file, a flag or a name is wrong: the user's error. One line says what is wrong, where, and what to do."""

    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class InvariantLostError(ConfigError):
    """A daemon cannot keep one of its invariants, and exits. Nothing else ends a daemon that has joined:

    - another daemon has taken the node's name (node/registration.py),
    - another daemon holds the lock of its state folder (node/memory.py),
    - etcd keeps refusing this daemon's user or certificate (view/cluster_watch.py).

    """


@dataclass
class StoreError(Exception):
    """etcd refused a request or did not answer. `target` is its address or a key."""

    target: str
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


class StoreUnreachableError(StoreError):
    """No etcd answered within the deadline."""


class LeaseLostError(StoreError):
    """The lease is gone, with everything registered under it."""


class ConflictError(StoreError):
    """A compared revision has moved on: another process wrote first."""


class CompactedError(StoreError):
    """etcd does not have a revision: it was compacted, or is not reached in a history that went back. List again."""


@dataclass
class RecoveryError(Exception):
    """State that should exist is missing: `item` names it."""

    item: str
    reason: str

    def __str__(self) -> str:
        return f"{self.item}: {self.reason}"


class NoAccessError(RecoveryError):
    """This node lacks the credentials or the package for a file system; another node may have them."""


class StorageAwayError(RecoveryError):
    """A file system does not answer, or lacks a file that was read before: an outage that counts against no node."""


class UnwritableError(RecoveryError):
    """This machine's disk takes no more of a file: no other source of it can help."""


class DamagedCopyError(RecoveryError):
    """A copy differs from its registration: another attempt would find the same damage."""


@dataclass
class JobFailedError(Exception):
    """A job ended without finishing. `phase` is its last phase, `last_line` the traceback's last line, `where` the full
    text.
    """

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
    """Return the first error of a group; return any other error itself."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def in_one_line(error: BaseException) -> str:
    """Return an unexpected error as `Kind: message`; for a group, its first error."""
    first = first_of(error)
    return shortened(f"{type(first).__name__}: {first}".rstrip(": "))


def shortened(reason: str) -> str:
    """Return a reason on one line of at most MAX_REASON_CHARACTERS."""
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[: MAX_REASON_CHARACTERS - 1]}…"
