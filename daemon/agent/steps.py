"""The steps that a daemon can take about plans: one dataclass per step. Pure; agent.py carries them out."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from headway.daemon.reach.reach_target import Target
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import StateRecord, WorkerRecord
from headway.daemon.storage.state_key import StateKey
from headway.daemon.workers.goal import Goal
from headway.daemon.workers.status import JobGeneration
from headway.stages.state.file_digest import FileDigest


@dataclass(frozen=True, slots=True)
class OpenData:
    """Open the job's token shards on this node."""

    device_index: int
    run_key: JobGeneration


@dataclass(frozen=True, slots=True)
class ProveLink:
    """Dial the future neighbour of one of our workers, before the plan takes effect."""

    run_key: JobGeneration
    position: int
    """Position of this node's worker in the plan."""
    other: int
    """Position of the neighbour in the plan."""
    target: Target
    """Address where the neighbour listens."""


@dataclass(frozen=True, slots=True)
class AnswerStop:
    """Fill in the boundary that the worker of position 0 chose."""

    run_key: JobGeneration
    boundary: int


@dataclass(frozen=True, slots=True)
class CopyToCheckpoint:
    """Copy a held file to the job's checkpoint folder."""

    key: StateKey


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a file that a worker will load into the store, from another node or from a checkpoint."""

    device_index: int
    run_key: JobGeneration
    key: StateKey
    holders: tuple[str, ...]
    """Nodes that have the file."""
    checkpoint_url: str
    """Folder of the boundary in durable storage; empty: there is no checkpoint of it."""
    expected: FileDigest
    """Size and hash of the file."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """One file that another node has and this one should have too."""

    layer: str
    holders: tuple[str, ...]
    """Nodes that have the file; the first one is asked first."""
    expected: FileDigest


@dataclass(frozen=True, slots=True)
class FetchCopies:
    """Fetch copies of a stage's files of one boundary, so that they survive the loss of their owner."""

    job: str
    generation: int
    timeline: int
    boundary: int
    stage_index: int
    files: tuple[CopyFile, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Keys of the files to fetch."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, file.layer) for file in self.files)


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """Record a worker's progress in etcd."""

    run_key: JobGeneration
    position: int
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class RegisterState:
    """Record in etcd which files of a boundary this node holds."""

    job: str
    timeline: int
    boundary: int
    record: StateRecord


@dataclass(frozen=True, slots=True)
class UnregisterState:
    """Record in etcd that this node no longer holds files of a boundary, before they are deleted."""

    job: str
    timeline: int
    boundary: int


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Delete files of a boundary that no plan needs."""

    job: str
    timeline: int
    boundary: int
    layers: tuple[str, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Keys of the files to delete."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, layer) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give up a worker's part of a generation, because something that it needs is missing."""

    device_index: int
    run_key: JobGeneration
    reason: str


@dataclass(frozen=True, slots=True)
class SetGoal:
    """Tell a worker its goal."""

    device_index: int
    goal: Goal


Step = (
    SetGoal
    | OpenData
    | ProveLink
    | AnswerStop
    | CopyToCheckpoint
    | FetchState
    | FetchCopies
    | RegisterWorker
    | RegisterState
    | UnregisterState
    | DeleteState
    | GiveUp
)


def job_of_step(step: RegisterWorker | RegisterState | UnregisterState | AnswerStop) -> str:
    return step.job if isinstance(step, RegisterState | UnregisterState) else step.run_key.job


def etcd_key(step: RegisterWorker | RegisterState | UnregisterState | AnswerStop | DeleteState, node: str) -> str:
    match step:
        case RegisterWorker():
            return Keys.worker(step.run_key.job, step.run_key.generation, step.position)
        case AnswerStop():
            return Keys.of(step.run_key.job, "stop")
        case RegisterState() | UnregisterState() | DeleteState():
            return Keys.state(step.job, step.timeline, step.boundary, node)


def fetched_by(step: Step) -> dict[StateKey, frozenset[str]]:
    """Return the files that a step brings into the store, and the nodes that it may ask."""
    match step:
        case FetchState():
            return {step.key: frozenset(step.holders)}
        case FetchCopies():
            return {key: frozenset(file.holders) for key, file in zip(step.keys, step.files, strict=True)}
        case _:
            return {}


def is_still_wanted(fetched: Mapping[StateKey, frozenset[str]], wanted: Mapping[StateKey, frozenset[str]]) -> bool:
    """Return whether a running fetch still has a due file, and every node that it may ask for one exists."""
    due = fetched.keys() & wanted.keys()
    return bool(due) and all(fetched[key] <= wanted[key] for key in due)


def stands_back(step: Step, steps: list[Step]) -> bool:
    """Return whether a step copies a file that a worker waits for. The worker's own fetch is faster and goes first."""
    if not isinstance(step, FetchCopies):
        return False
    return any(isinstance(other, FetchState) and other.key in step.keys for other in steps)


def claims(step: Step, node: str) -> frozenset[object]:
    """Return the objects on which a step works: no two steps of one object run at once."""
    match step:
        case FetchState() | FetchCopies():
            return frozenset(fetched_by(step))
        case RegisterState() | UnregisterState():
            return frozenset([etcd_key(step, node)])
        case DeleteState():
            return frozenset([etcd_key(step, node), *step.keys])
        case _:
            return frozenset([name_of(step)])


def name_of(step: Step) -> object:
    """Return a name that does not change with a step's details, because attempts are counted by name."""
    match step:
        case FetchState():
            return FetchState, step.run_key, step.key
        case FetchCopies():
            return FetchCopies, step.job, step.timeline, step.boundary, step.stage_index
        case RegisterState():
            return RegisterState, step.job, step.timeline, step.boundary
        case SetGoal():
            return SetGoal, step.device_index
        case _:
            return step


@dataclass(slots=True)
class _Failures:
    num_attempts: int = 0
    num_outages: int = 0
    """Number of attempts that met an outage of storage."""
    reason: str | None = None


class StepFailures:
    """Failures by the name of the step."""

    def __init__(self) -> None:
        self._steps: dict[object, _Failures] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def failed(self, name: object, reason: str, *, is_outage: bool = False) -> tuple[int, bool]:
        """Count a failure. Return the number in a row, and whether the reason is new."""
        step = self._steps.setdefault(name, _Failures())
        step.num_attempts += 1
        step.num_outages += is_outage
        is_news, step.reason = step.reason != reason, reason
        return step.num_attempts, is_news

    def charged(self, name: object) -> int:
        """Return how many failures of a step were not outages of storage."""
        step = self._steps.get(name, _Failures())
        return step.num_attempts - step.num_outages

    def start_over(self, name: object) -> None:
        """Count the next failure of a step as its first. Reasons that were reported are not repeated."""
        step = self._steps.setdefault(name, _Failures())
        step.num_attempts = step.num_outages = 0

    def succeeded(self, name: object) -> None:
        """Forget a step's failures."""
        self._steps.pop(name, None)

    def keep_only(self, names: Container[object]) -> None:
        """Forget steps that are no longer due."""
        self._steps = {name: step for name, step in self._steps.items() if name in names}
