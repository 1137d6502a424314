"""The history of a job: a row a batch. `metrics.jsonl` has each row once, in order, over any number of runs.

Batches whose rows are lost, because somebody deleted a journal part, have none.
"""

import fcntl
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSpec

METRICS_NAME: Final = "metrics.jsonl"
"""Name of the file in the folder of a run."""
AT_THE_END: Final = "after the last update"
"""When `final_eval_loss` is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """What is known of a batch."""

    batch: int
    loss: float
    """Nats per token, mean of its microbatches."""
    learning_rate: float
    """Of `[optim.matrices]`, in the batch's update."""
    tokens: int
    seconds: float
    """Wall clock since the batch before, on the last stage."""
    generation: int
    """Number of the plan that computed it; 0: the reference."""
    eval_loss: float | None = None
    """Nats per token of held-out text, on the weights that the batch was computed on; None: no evaluation."""
    gradient_norm: float | None = None
    """Of the batch's gradient before clipping, as docs/numerics.md defines it; None: it was not measured."""
    final_eval_loss: float | None = None
    """As `eval_loss`, on the weights that the batch's update made. The last batch of a job with evaluations has it."""

    @property
    def end_text(self) -> str:
        """Return what held-out text says of the last update's weights; empty: there is nothing to say."""
        return "" if self.final_eval_loss is None else f"held-out loss {self.final_eval_loss:.4f} {AT_THE_END}"

    def as_dict(self) -> dict[str, float]:
        """Return what is known, by name."""
        return {name: value for name in ROW_NAMES if (value := getattr(self, name)) is not None}

    def as_json(self) -> str:
        """Return it as one line of JSON; null is what is not finite, since JSON has no NaN."""
        return json.dumps({name: value if math.isfinite(value) else None for name, value in self.as_dict().items()})


ROW_BEGINS: Final = b'{"batch":'
ROW_NAMES: Final = tuple(each.name for each in fields(HistoryRow))


@dataclass(slots=True, kw_only=True)
class Gaps:
    """Finds rows that are lost among those that come: somebody has deleted or damaged a part of the journal."""

    every: int = 1
    """Only batches that it divides are asked for, and evaluated ones."""
    due: int = 0
    """The next batch that has a row if nothing is lost, before `every` is looked at."""

    def before(self, row: HistoryRow) -> str:
        """Return a sentence on what is missing before a row; empty: nothing is."""
        first, last = -(-self.due // self.every) * self.every, (row.batch - 1) // self.every * self.every
        self.due = max(row.batch + 1, self.due)
        which = f"row of batch {first} is" if first == last else f"rows of batches {first} to {last} are"
        return f"the {which} lost: a part of the journal is gone or damaged" if first <= last else ""


def rates(spec: JobSpec) -> Callable[[int], float]:
    """Return the learning rate of `[optim.matrices]` by batch, by this job's schedule: also of batches before it began,
    which a job before it has computed.
    """
    factor = spec.optim.rate_factors(spec.train.batches)
    return lambda batch: spec.optim.matrices.lr * factor(batch)


def read_rows(path: Path) -> list[HistoryRow]:
    """Return the rows of a metrics file; a torn last line does not count. Raises ConfigError, naming the line."""
    rows: list[HistoryRow] = []
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                rows.append(msgspec.convert(json.loads(line, object_hook=_with_nan), HistoryRow))
                if len(rows) > 1 and rows[-1].batch <= rows[-2].batch:
                    raise ConfigError(f"line {number} is batch {rows[-1].batch}, which is not a new one", str(path))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is no batch's metrics: {error}", str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", str(path)) from error
    return rows


def _with_nan(found: dict[str, object]) -> dict[str, object]:
    """Return what as_json has written: null stands for what was not finite."""
    return {name: math.nan if value is None else value for name, value in found.items()}


@contextmanager
def written(where: str) -> Iterator[None]:
    """Tell as ConfigError, with `where`, that the block cannot write."""
    try:
        yield
    except BlockingIOError as error:
        raise ConfigError("another process writes to it now; end that one, or name another file", where) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", where) from error


class MetricsFile:
    """Appends the rows as JSON, one a line. A context manager. One process at a time writes to a file.

    Python writes a float as the shortest text that reads back to equal bits, so losses can be compared exactly.
    """

    def __init__(self, path: Path, *, is_resumed: bool = False, where: str = "") -> None:
        """is_resumed: continue after the last complete line; otherwise begin a new file. where: names it in errors.

        Raises ConfigError for another file, and one that cannot be written, or is written by another process.
        """
        self._where = where or str(path)
        self.last_batch = -1
        """Newest batch in the file; -1 when there is none."""
        with written(self._where):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab")
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.last_batch, length = _whole_lines(path) if is_resumed else (-1, 0)
                self._stream.truncate(length)
            except BaseException:
                self._stream.close()
                raise

    def append(self, row: HistoryRow) -> None:
        """Write a batch and flush. A batch that is already in the file is skipped. Raises ConfigError, on a full disk
        for one.
        """
        if row.batch <= self.last_batch:
            return
        with written(self._where):
            self._stream.write(row.as_json().encode() + b"\n")
            self._stream.flush()
        self.last_batch = row.batch

    def close(self) -> None:
        """Close the file. Idempotent. Raises ConfigError if it cannot take what is left."""
        with written(self._where):
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
                if not ROW_BEGINS.startswith(line[: len(ROW_BEGINS)]):  # another file, which nobody wants emptied
                    raise ConfigError(f"line {number} is not a batch's metrics", str(path))
                break
            try:
                found = json.loads(line)["batch"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"line {number} is not a batch's metrics", str(path)) from error
            if not isinstance(found, int) or found <= batch:
                raise ConfigError(f"line {number} is batch {found}, which cannot follow batch {batch}", str(path))
            batch, length = found, length + len(line)
    return batch, length
