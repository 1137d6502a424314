"""Reads a run's history from its folders: the workers' operations, the daemons' events."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.logging import DAEMONS_FOLDER, MONOTONIC
from headway.daemon.cluster.records import Phase, PlanRecord
from tests.chaos.checker import History, Load, Operation, PlanSeen

OPERATIONS = frozenset({"forward", "backward", "update"})

LineT = TypeVar("LineT")


def read_history(folders: Path | Iterable[Path], job: str) -> History:
    """Return everything about one job; a missing folder adds nothing.

    Raises ConfigError for a line that is not a history's, naming file and line.
    """
    folders = [folders] if isinstance(folders, Path) else list(folders)
    torn: list[Path] = []
    operations: list[Operation] = []
    loads: list[Load] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        for line in _lines(path, torn):
            if line.get("job") != job:
                continue
            if line.get("op") in OPERATIONS:
                operations.append(_read(line, _operation, path))
            elif line.get("event") == "loaded":
                loads.append(_read(line, _load, path))
    events = [event for event in read_events(folders, torn) if event.get("job") == job]
    plans = {plan.generation: plan for event in events if (plan := _plan(event)) is not None}
    phases = [event for event in events if event["event"] == "phase_seen"]
    finished = [float(event[MONOTONIC]) for event in phases if event["phase"] == Phase.FINISHED]
    return History(
        plans=[plans[generation] for generation in sorted(plans)],
        operations=operations,
        loads=loads,
        is_finished=bool(finished),
        end=next((event.get("boundary") for event in phases if event["phase"] == Phase.FINISHED), None),
        ended_at=min(finished, default=None),
        num_torn=len(torn),
    )


def read_events(folders: Iterable[Path], torn: list[Path] | None = None) -> list[dict[str, Any]]:
    """Return the daemons' lines of all jobs and of none, in order of time."""
    torn = torn if torn is not None else []
    paths = [path for folder in folders for path in sorted((folder / DAEMONS_FOLDER).glob("*.jsonl"))]
    events = [line for path in paths for line in _lines(path, torn) if "event" in line and MONOTONIC in line]
    return sorted(events, key=lambda line: float(line[MONOTONIC]))


def plan_seen(plan: PlanRecord) -> PlanSeen:
    """Return a plan in the checker's form."""
    return PlanSeen(
        generation=plan.generation,
        timeline=plan.timeline,
        boundary=plan.boundary,
        ancestry=plan.ancestry,
        source=plan.source,
        source_timeline=plan.source_timeline,
        stages=tuple(stage.layers for stage in plan.workers),
        groups=tuple(stage.groups for stage in plan.workers),
    )


def _plan(event: dict[str, Any]) -> PlanSeen | None:
    if event["event"] != "plan_seen":
        return None
    try:
        return plan_seen(msgspec.convert(event["plan"], PlanRecord))
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"a plan that cannot be read: {error}", f"history of node {event.get('node')}") from error


def _lines(path: Path, torn: list[Path]) -> Iterator[dict[str, Any]]:
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(texts):  # no newline, because its writer was killed
                torn.append(path)
                continue
            raise ConfigError(f"line {number} is not JSON: {error}", str(path)) from error
        if isinstance(line, dict):
            yield line


def _read(line: dict[str, Any], kind: Callable[[dict[str, Any]], LineT], path: Path) -> LineT:
    try:
        return kind(line)
    except KeyError as error:
        raise ConfigError(f"a line without {error}: {json.dumps(line)[:200]}", str(path)) from error


def _operation(line: dict[str, Any]) -> Operation:
    return Operation(
        generation=line["generation"],
        worker=line.get("worker", line["stage"]),
        op=line["op"],
        batch=line["batch"],
        microbatch=line["microbatch"],
        version=line["version"],
        versions_live=line["versions_live"],
        started=line["started"],
        process=f"worker {line['pid']} of {line['node']}",
    )


def _load(line: dict[str, Any]) -> Load:
    return Load(
        generation=line["generation"],
        layer=line["layer"],
        boundary=line["boundary"],
        source=line["source"],
        source_timeline=line["source_timeline"],
    )
