"""What a stage did and when: the trace from which the delay, the versions and the counts can be checked."""

import json
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from headway.stages.ids import Generation, StageIndex
from headway.stages.schedule import Backward, Forward, Op


class Recorder(Protocol):
    """Is told of every operation, in order."""

    def record(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """version: the weight version that the operation read. started, ended: seconds, monotonic."""
        ...


class HistoryFile:
    """A recorder that appends one JSON line per operation: generation, stage, op, batch, microbatch, version, times."""

    def __init__(self, path: Path, *, generation: Generation, stage_index: StageIndex) -> None:
        """Raises OSError when the file cannot be opened."""
        self._file = path.open("a", buffering=1 << 16)
        self._generation = generation
        self._stage_index = stage_index

    def record(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """Buffer a line."""
        line = {
            "generation": self._generation,
            "stage": self._stage_index,
            "op": type(op).__name__.lower(),
            "batch": op.batch,
            "microbatch": op.microbatch if isinstance(op, Forward | Backward) else None,
            "version": version,
            "versions_live": num_versions_live,
            "started": started,
            "ended": ended,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write out what is buffered. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
