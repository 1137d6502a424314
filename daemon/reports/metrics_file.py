"""`metrics.jsonl`: one line a batch, each batch once, in order, over any number of runs.

Batches whose rows are lost, because somebody deleted a journal part, have no line.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from headway.daemon.base.errors import ConfigError


class MetricsFile:
    """Appends lines `{"batch", "loss", "tokens", "seconds", "generation"}`. A context manager.

    A batch that begins with an evaluation also has `eval_loss`: nats per token of held-out text, on the weights that
    the batch was computed on.

    Python writes a float as the shortest text that reads back to equal bits, so losses can be compared exactly.
    """

    def __init__(self, path: Path, *, is_resumed: bool = False) -> None:
        """is_resumed: continue after the last complete line; otherwise begin a new file. Raises ConfigError for another
        file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_batch = -1
        """Newest batch in the file; -1 when there is none."""
        length = 0
        if is_resumed and path.exists():
            self.last_batch, length = _whole_lines(path)
        self._stream = path.open("ab")
        self._stream.truncate(length)

    def append(
        self,
        *,
        batch: int,
        loss: float,
        tokens: int,
        seconds: float,
        generation: int,
        eval_loss: float | None = None,
    ) -> None:
        """Write a batch and flush. A batch that is already in the file is skipped."""
        if batch <= self.last_batch:
            return
        line = {"batch": batch, "loss": loss, "tokens": tokens, "seconds": seconds, "generation": generation}
        if eval_loss is not None:
            line["eval_loss"] = eval_loss
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()
        self.last_batch = batch

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _whole_lines(path: Path) -> tuple[int, int]:
    """Return (last batch, length in bytes) of the complete lines; a torn last one does not count."""
    batch, length = -1, 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)["batch"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"line {number} is not a batch's metrics", str(path)) from error
            if not isinstance(found, int) or found <= batch:
                raise ConfigError(f"line {number} is batch {found}, which cannot follow batch {batch}", str(path))
            batch, length = found, length + len(line)
    return batch, length
