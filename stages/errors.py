"""Errors between workers. They carry fields; the sentence is made from the fields."""

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass
class PeerError(Exception):
    """Another process is to blame. `peer` names it for people."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer}: {self.reason}"


class UnavailableError(PeerError):
    """The peer did not answer within its deadline, or is gone."""


class UnreachedError(UnavailableError):
    """The peer was dialled and has never answered."""


@dataclass
class PortsTakenError(Exception):
    """Other processes listen at every port that this process may take."""

    host: str
    ports: tuple[int, ...]

    def __str__(self) -> str:
        first, last = self.ports[0], self.ports[-1]
        told = f"port {first}" if first == last else f"each of the ports {first} to {last}"
        return f"{told} at {self.host} is in use: free one, or name more of them as worker_ports"


@dataclass
class NotListeningError(Exception):
    """This process cannot listen at its host and port, although no other process listens there."""

    host: str
    port: int
    reason: str

    def __str__(self) -> str:
        return f"cannot listen at {self.host}:{self.port}: {self.reason}"


class ProtocolError(PeerError):
    """The peer sent something that the protocol does not allow."""


@dataclass
class LinkOverflowError(Exception):
    """The caller sent more than any schedule can have in flight: a bug, reported before memory grows."""

    peer: str
    unacknowledged_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"{self.peer}: {self.unacknowledged_bytes} bytes unacknowledged, the limit is {self.limit_bytes}"


@dataclass
class DataError(Exception):
    """A data folder is missing, damaged, or not the requested one. `path` names the file."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass
class MissingPackageError(Exception):
    """A package that a job needs is not installed on this machine."""

    package: str
    extra: str
    """Extra of Headway that brings it."""
    what: str
    """What needs it."""

    def __str__(self) -> str:
        return f"{self.what} needs {self.package}, which is not installed: `pip install 'headway[{self.extra}]'`"


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise MissingPackageError unless a package is there. The arguments are its fields."""
    if find_spec(package) is None:
        raise MissingPackageError(package, extra, what)


@dataclass
class CompilationError(Exception):
    """This machine cannot compile the layers with the job's settings."""

    reason: str

    def __str__(self) -> str:
        return f"train.compile: {self.reason}"


@dataclass
class KernelError(Exception):
    """This machine cannot compute attention with the kernel that the job names."""

    reason: str

    def __str__(self) -> str:
        return f"train.attention_backend: {self.reason}"


@dataclass
class DamagedFileError(Exception):
    """A state file is truncated, altered, or not the requested one."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass
class AbortedError(Exception):
    """An authorized caller ended a stage's run before its boundary."""

    reason: str

    def __str__(self) -> str:
        return f"aborted: {self.reason}"


@dataclass
class NonFiniteLossError(Exception):
    """A microbatch's loss is infinite or NaN: the run cannot continue from here."""

    batch: int
    microbatch: int
    loss: float

    def __str__(self) -> str:
        return f"the loss of batch {self.batch}, microbatch {self.microbatch}, is {self.loss}"
