"""Errors by who is to blame. Adapters translate grpc, etcd and file errors at the edge with `raise … from`."""

from dataclasses import dataclass

EXIT_CONFIG = 2
EXIT_UNREACHABLE = 3
EXIT_JOB_FAILED = 4


@dataclass
class ConfigError(Exception):
    """The user's: a file, a flag or a name is wrong. One line that says what, where, and what to do."""

    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


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
