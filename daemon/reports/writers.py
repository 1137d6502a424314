"""Writers of a job's history for other tools, outside the workers: nothing here can touch a bit of a job.

Each appends rows in order. One that is started again goes on after the newest batch that it finds written.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from headway.daemon.base.errors import ConfigError
from headway.daemon.reports.metrics_file import HistoryRow, MetricsFile, read_rows, written
from headway.stages.errors import check_installed

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter
    from wandb.proto.wandb_internal_pb2 import Record

WandbMode = Literal["offline", "online"]
WANDB_TIMEOUT_S: Final = 60.0
"""Weights & Biases has so long to answer at the start, and to take what is left at the end."""
LOG_BLOCK_BYTES: Final = 32768
LOG_PIECE: Final = struct.Struct("<IHB")
WANDB_HEADER_BYTES: Final = 7


class RowWriter(Protocol):
    """Takes the rows of one job."""

    def append(self, row: HistoryRow) -> None:
        """Write a row, unless its batch is written already. Raises ConfigError, OSError."""

    def close(self) -> None:
        """Write what is left."""


@contextmanager
def opened(
    job: str,
    uid: str,
    *,
    jsonl: Path | None = None,
    tensorboard: Path | None = None,
    wandb: WandbMode | None = None,
) -> Iterator[Callable[[HistoryRow], None]]:
    """Give what writes a row of a job everywhere. Raises ConfigError, MissingPackageError.

    jsonl: a metrics file. tensorboard: a folder with a folder for each job.
    """
    with ExitStack() as stack:
        writers: list[tuple[str, RowWriter]] = []

        def add(name: str, make: Callable[[], RowWriter]) -> None:
            with written(name):
                writers.append((name, stack.enter_context(_closing(name, make()))))

        if jsonl is not None:
            add(name := f"--jsonl {jsonl}", lambda: JsonLines(jsonl, name))
        if tensorboard is not None:
            add(f"--tensorboard {tensorboard}", lambda: TensorBoard(tensorboard / job, uid))
        if wandb is not None:
            add(f"--wandb {wandb}", lambda: WeightsAndBiases(job, uid, wandb))

        def append(row: HistoryRow) -> None:
            for name, writer in writers:
                with written(name):
                    writer.append(row)

        yield append


@contextmanager
def _closing(name: str, writer: RowWriter) -> Iterator[RowWriter]:
    try:
        yield writer
    finally:
        with written(name):  # what is left may find the disk full
            writer.close()


class JsonLines:
    """A metrics file. Raises ConfigError for another file. where: names it in errors."""

    def __init__(self, path: Path, where: str) -> None:
        self._path = path
        self._file = MetricsFile(path, is_resumed=True, where=where)
        self._losses = {row.batch: row.loss for row in read_rows(path)}
        """Of the batches that were there and have not come again."""

    def append(self, row: HistoryRow) -> None:
        """Write a row. Raises ConfigError if the file has another loss for it: it is another job's."""
        loss = self._losses.pop(row.batch, row.loss)
        if loss != row.loss and (math.isfinite(loss) or math.isfinite(row.loss)):  # JSON has one word for the others
            raise ConfigError(
                f"has loss {loss} for batch {row.batch}, which is {row.loss}: another job's", str(self._path)
            )
        self._file.append(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard: step is the batch, tags are the names of the row's fields, values are float32."""

    def __init__(self, folder: Path, uid: str) -> None:
        """uid: the job's, which its files' names end with. Raises ConfigError when the folder has other events."""
        check_installed("tensorboard", "tensorboard", "`--tensorboard`")
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder = folder
        self._suffix = f".headway-{uid}"
        self._writer: RecordWriter | None = None
        """None before the first row that is new: each writer makes a file."""
        self._last_batch = -1
        """Newest batch in the folder; -1 when there is none."""
        for path in sorted(folder.glob("*tfevents*")):
            if not path.name.endswith(self._suffix):
                raise ConfigError(f"{path.name} is of another job; name another folder", str(folder))
            for record in RawEventFileLoader(str(path)).Load():  # ends before a torn record
                event = Event.FromString(record)
                if event.HasField("summary"):
                    self._last_batch = max(self._last_batch, event.step)

    def append(self, row: HistoryRow) -> None:
        """Write a row as one record, so a torn file has no half of a batch. Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if row.batch <= self._last_batch:
            return
        if self._writer is None:  # its own EventFileWriter has a thread, which dies of a full disk with a traceback
            seconds, ns = divmod(time.time_ns(), 10**9)
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{ns:09}{self._suffix}"
            self._writer = RecordWriter(path.open("xb"))
            self._writer.write(Event(wall_time=seconds, file_version="brain.Event:2").SerializeToString())
        known = row.as_dict().items()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in known if name != "batch"]
        event = Event(wall_time=time.time(), step=row.batch, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())
        self._writer.flush()
        self._last_batch = row.batch

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases for a job: step is the batch, keys are the names of the row's fields.

    Its files are in $WANDB_DIR/wandb, else ./wandb. Each writer has a folder of its own there. Offline, one goes on
    after the newest step in the folders that it finds; online, after the newest step that the server has.
    """

    def __init__(self, job: str, uid: str, mode: WandbMode) -> None:
        """Raises ConfigError when the service refuses or does not answer."""
        check_installed("wandb", "wandb", "`--wandb`")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else its own faults go over the network
        import wandb

        folder, run_id = Path(os.environ.get("WANDB_DIR", ".")), f"headway-{uid}"
        (folder / "wandb").mkdir(parents=True, exist_ok=True)  # else it silently takes a temporary folder
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=WANDB_TIMEOUT_S,
            finish_timeout=WANDB_TIMEOUT_S,
            finish_timeout_raises=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        project = os.environ.get("WANDB_PROJECT", "headway")
        self._mode, self._folder, self._files = mode, folder, f"wandb/offline-run-*-{run_id}/*.wandb"
        self._last_batch, newest = -1, self._newest_step()
        try:
            self._run = wandb.init(
                dir=str(folder), project=project, name=job, id=run_id, resume="allow", mode=mode, settings=settings
            )
        except wandb.Error as error:
            raise ConfigError(" ".join(str(error).split()), f"--wandb {mode}") from error
        self._next_batch = newest + 1 if mode == "offline" else self._run.starting_step

    def _newest_step(self) -> int:
        """Return the newest step in the folders of this job; -1 when there is none."""
        records = (each for path in self._folder.glob(self._files) for each in wandb_records(path))
        return max((each.history.step.num for each in records if each.HasField("history")), default=-1)

    def append(self, row: HistoryRow) -> None:
        """Hand a row to the service's own process, which writes or sends it."""
        if row.batch >= self._next_batch:
            known = {name: value for name, value in row.as_dict().items() if name != "batch"}
            self._run.log(known, step=row.batch, commit=True)
            self._last_batch = row.batch

    def close(self) -> None:
        """Write or send what is left. Raises TimeoutError: what was not sent is in the folder, for `wandb sync`.

        Raises OSError for batches that the service's process has dropped, which tells nobody of a full disk.
        """
        import wandb

        try:
            self._run.finish()
        finally:
            wandb.teardown()  # waits for the service's process, which closes the file after `finish` has returned
        if self._mode == "offline" and (found := self._newest_step()) < self._last_batch:
            raise OSError(
                f"batches {found + 1} to {self._last_batch} are not in {self._folder / 'wandb'}; is its disk full?"
            )


def wandb_records(path: Path) -> "Iterator[Record]":
    """Yield the whole records of an offline file of Weights & Biases, which has no reader of its own for Python.

    Raises ConfigError for a damaged file.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for number, record in enumerate(_leveldb_records(path.read_bytes(), start=WANDB_HEADER_BYTES), start=1):
        try:
            yield Record.FromString(record)
        except DecodeError as error:
            raise ConfigError(f"record {number} is damaged; move its folder away", str(path)) from error


def _leveldb_records(data: bytes, *, start: int) -> Iterator[bytes]:
    """Yield the whole records of a log as LevelDB writes it: pieces in blocks, each (CRC, length, kind), then bytes."""
    at, record = start, b""
    while at + LOG_PIECE.size <= len(data):
        if (left := LOG_BLOCK_BYTES - at % LOG_BLOCK_BYTES) < LOG_PIECE.size:
            at += left  # no piece begins in so short a rest
            continue
        _, length, kind = LOG_PIECE.unpack_from(data, at)
        at += LOG_PIECE.size + length
        if kind == 0 or at > len(data):
            return
        is_first, is_last = kind in (1, 2), kind in (1, 4)
        record = (b"" if is_first else record) + data[at - length : at]
        if is_last:
            yield record
