"""The steps that a daemon can take about plans: one dataclass per step. Pure; agent.py carries them out."""

from collections.abc import Container
from dataclasses import dataclass

from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.net.reach_target import Target
from headway.daemon.worker.goal import Goal, JobGeneration
from headway.stages.state.file_digest import FileDigest


@dataclass(frozen=True, slots=True)
class SetGoal:
    """Tell a worker its goal."""

    device_index: int
    goal: Goal


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
class Fetch:
    """Bring a file into the store: one that a worker will load, or a copy that is to survive the loss of its owner."""

    device_index: int | None
    """Device of the worker that waits for it; None: it is a copy."""
    run_key: JobGeneration
    key: StateKey
    holders: tuple[str, ...]
    """Nodes that have the file."""
    checkpoint_url: str
    """Folder of the boundary in durable storage; empty: there is no checkpoint of it."""
    expected: FileDigest
    """Size and hash of the file."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Copy a held file to the job's checkpoint folder."""

    key: StateKey


@dataclass(frozen=True, slots=True)
class Register:
    """Write one of this node's records of a job to etcd, or delete it."""

    key: str
    job: str
    record: object | None
    """None: it is deleted, before what it tells of is."""
    rests_on: tuple[str, ...]
    """Last parts of the job's keys from which it was decided: it is written only while they are unchanged."""
    is_leased: bool = True
    """Whether it goes with this node's lease."""


@dataclass(frozen=True, slots=True)
class Delete:
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


Step = SetGoal | OpenData | ProveLink | Fetch | Upload | Register | Delete | GiveUp


def record_key(step: Step, node: str) -> str:
    """Return the key of the record that a step writes, or that tells of what it deletes; empty: there is none."""
    match step:
        case Register():
            return step.key
        case Delete():
            return Keys.state(step.job, step.timeline, step.boundary, node)
        case _:
            return ""


def claims(step: Step, node: str) -> frozenset[object]:
    """Return the objects on which a step works: no two steps of one object run at once."""
    match step:
        case Fetch():
            return frozenset([step.key])
        case Register():
            return frozenset([step.key])
        case Delete():
            return frozenset([record_key(step, node), *step.keys])
        case _:
            return frozenset([name_of(step)])


def name_of(step: Step) -> object:
    """Return a name that does not change with a step's details, because attempts are counted by name."""
    match step:
        case Fetch():
            return Fetch, step.device_index, step.key
        case Register() | Upload():
            return type(step), step.key
        case SetGoal():
            return SetGoal, step.device_index
        case _:
            return step


def wanted_fetches(steps: list[Step]) -> dict[StateKey, Fetch]:
    """Return the fetch that is due of each file. A worker's own is faster than a copy, and takes its place."""
    found: dict[StateKey, Fetch] = {}
    for step in steps:
        if isinstance(step, Fetch) and (step.device_index is not None or step.key not in found):
            found[step.key] = step
    return found


def is_still_wanted(step: Fetch, wanted: dict[StateKey, Fetch]) -> bool:
    """Return whether a running fetch is due as it is, and every node that it may ask exists."""
    due = wanted.get(step.key)
    is_alike = due is not None and (step.device_index is None) == (due.device_index is None)
    return due is not None and is_alike and set(step.holders) <= set(due.holders)


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
