"""Reads a run's history back from its folders: the workers' operations, the daemons' events."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.daemon.errors import ConfigError
from headway.daemon.history.checker import History, Operation, PlanSeen
from headway.daemon.history.events import DAEMONS_FOLDER, MONOTONIC
from headway.daemon.records import Phase, PlanRecord

OPERATIONS = frozenset({"forward", "backward", "update"})


def read_history(folders: Path | Iterable[Path], job: str) -> History:
    """Everything about one job; a folder that is not there has nothing to say.

    Raises ConfigError for a line that is none of a history, naming file and line.
    """
    folders = [folders] if isinstance(folders, Path) else list(folders)
    torn: list[Path] = []
    operations: list[Operation] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        if _job_of(path) == job:
            lines = (line for line in _lines(path, torn) if line.get("op") in OPERATIONS)
            operations += [_operation(line, path) for line in lines]
    events = [event for event in read_events(folders, torn) if event.get("job") == job]
    plans = {plan.generation: plan for event in events if (plan := _plan(event)) is not None}
    phases = [event for event in events if event["event"] == "phase_seen"]
    finished = [float(event[MONOTONIC]) for event in phases if event["phase"] == Phase.FINISHED]
    return History(
        plans=[plans[generation] for generation in sorted(plans)],
        operations=operations,
        is_finished=bool(finished),
        ended_at=min(finished, default=None),
        num_torn=len(torn),
    )


def read_events(folders: Iterable[Path], torn: list[Path] | None = None) -> list[dict[str, Any]]:
    """The daemons' lines of all jobs and of none, in order of time."""
    torn = torn if torn is not None else []
    paths = [path for folder in folders for path in sorted((folder / DAEMONS_FOLDER).glob("*.jsonl*"))]
    events = [line for path in paths for line in _lines(path, torn) if "event" in line and MONOTONIC in line]
    return sorted(events, key=lambda line: float(line[MONOTONIC]))


def plan_seen(plan: PlanRecord) -> PlanSeen:
    """A plan as the checker wants it."""
    return PlanSeen(
        generation=plan.generation,
        timeline=plan.timeline,
        boundary=plan.boundary,
        ancestry=plan.ancestry,
        source=plan.source,
        source_timeline=plan.source_timeline,
        stages=tuple(stage.layers for stage in plan.stages),
    )


def _plan(event: dict[str, Any]) -> PlanSeen | None:
    if event["event"] != "plan_seen":
        return None
    try:
        return plan_seen(msgspec.convert(event["plan"], PlanRecord))
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"a plan that cannot be read: {error}", f"history of node {event.get('node')}") from error


def _job_of(path: Path) -> str:
    """`<job>-<generation>-<stage>.jsonl`; empty for a file of another name."""
    job, *numbers = path.stem.rsplit("-", 2)
    return job if len(numbers) == 2 and all(number.isdigit() for number in numbers) else ""


def _lines(path: Path, torn: list[Path]) -> Iterator[dict[str, Any]]:
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):  # no newline after it: its writer was killed
                torn.append(path)
                continue
            raise ConfigError(f"line {number} is no JSON: {error}", str(path)) from error
        if isinstance(line, dict):
            yield line


def _operation(line: dict[str, Any], path: Path) -> Operation:
    try:
        return Operation(
            generation=line["generation"],
            stage=line["stage"],
            op=line["op"],
            batch=line["batch"],
            microbatch=line.get("microbatch"),
            version=line["version"],
            versions_live=line["versions_live"],
            started=line["started"],
            process=f"worker {line['pid']}" if "pid" in line else "",
        )
    except KeyError as error:
        raise ConfigError(f"an operation without {error}", str(path)) from error
