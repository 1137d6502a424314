"""Names a plan's workers in words: which stage, which replica, how many of each. Pure."""

from collections.abc import Sequence
from typing import Final

from headway.daemon.records.records import WorkerPart, replicas_of

MOST_RUNS: Final = 4
"""Maximum number of runs of consecutive groups that are listed."""


def worker_name(workers: Sequence[WorkerPart], position: int) -> str:
    """Return `stage 1 on node-3`, or `stage 1 on node-3 (replica 2 of 2)`."""
    return f"{stage_name(workers, position)} on {workers[position].node}{replica_note(workers, position)}"


def stage_name(workers: Sequence[WorkerPart], position: int) -> str:
    """Return `stage 1`."""
    return f"stage {_place_of(workers, position)[0]}"


def replica_note(workers: Sequence[WorkerPart], position: int) -> str:
    """Return ` (replica 2 of 2)`; empty if the stage has one worker."""
    _, number, num_replicas = _place_of(workers, position)
    return f" (replica {number} of {num_replicas})" if num_replicas > 1 else ""


def shape(workers: Sequence[WorkerPart]) -> str:
    """Return `1 stage`, `3 stages`, `3 stages of 2, 1 and 2 replicas`."""
    counts = [len(positions) for positions in replicas_of(workers)]
    text = f"{len(counts)} stage{'s' * (len(counts) != 1)}"
    if max(counts, default=1) == 1:
        return text
    if len(set(counts)) == 1:
        return f"{text} of {counts[0]} replicas" + (" each" if len(counts) > 1 else "")
    return f"{text} of {', '.join(map(str, counts[:-1]))} and {counts[-1]} replicas"


def group_names(groups: Sequence[int]) -> str:
    """Return reduction groups for people: `group 0`, `groups 0-3`, `groups 0, 2-3 and 5`, `16 groups from 0 to 61`."""
    if len(groups) == 1:
        return f"group {groups[0]}"
    runs: list[list[int]] = []
    for group in groups:
        if runs and runs[-1][-1] == group - 1:
            runs[-1][1:] = [group]
        else:
            runs.append([group])
    if len(runs) > MOST_RUNS:
        return f"{len(groups)} groups from {groups[0]} to {groups[-1]}"
    names = ["-".join(map(str, run)) for run in runs]
    return f"groups {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"groups {names[0]}"


def _place_of(workers: Sequence[WorkerPart], position: int) -> tuple[int, int, int]:
    """Return (stage from 0, replica from 1, replicas of the stage)."""
    for stage, positions in enumerate(replicas_of(workers)):
        if position in positions:
            return stage, positions.index(position) + 1, len(positions)
    raise IndexError(position)


def layer_range(layers: Sequence[str]) -> str:
    """Return consecutive layers in few characters: `embed, block.0-3`."""
    blocks = [name.removeprefix("block.") for name in layers if name.startswith("block.")]
    parts = ["embed"] if "embed" in layers else []
    if blocks:
        parts.append(f"block.{blocks[0]}" + (f"-{blocks[-1]}" if len(blocks) > 1 else ""))
    if "head" in layers:
        parts.append("head")
    return ", ".join(parts)
