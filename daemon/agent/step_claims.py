"""Names steps and the objects on which they work, so that no two steps work on one object at once. Pure."""

from collections.abc import Mapping

from headway.daemon.agent.steps import (
    AnswerStop,
    DeleteState,
    FetchCopies,
    FetchState,
    RegisterState,
    RegisterWorker,
    Step,
    UnregisterState,
)
from headway.daemon.records.keys import Keys
from headway.daemon.storage.state_key import StateKey
from headway.daemon.workers.orders import (
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderSpaceSnapshots,
    OrderStart,
    OrderStopAt,
    OrderTrimJournal,
    OrderWrite,
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
        case OrderRelease():
            return OrderRelease, step.device_index, step.job
        case OrderPrepare() | OrderStart() | OrderChooseStop() | OrderStopAt() | OrderWrite():
            return type(step), step.device_index, step.run_key
        case OrderSpaceSnapshots() | OrderTrimJournal():
            return type(step), step.device_index, step.run_key
        case _:
            return step
