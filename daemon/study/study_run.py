"""`headway study`: trains the cells of a study, one process each, and writes what they end at.

DIR/results.jsonl has a row for each cell that is done; the same command goes on from there. DIR/jobs has the job file
of each, made of its row: a cluster that runs it has its bits.
"""

import fcntl
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import IO, Final, Self

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import bar, counted
from headway.daemon.jobs.changed_keys import job_text, values_of
from headway.daemon.jobs.job import JobSpec, OriginSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.plugins import import_plugins
from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.local.reference_run import check_memory, errors_told, tokens_here
from headway.daemon.models.origin_config import model_opener, read_parts
from headway.daemon.models.origin_model import initial_adapters_of, initial_weights_of
from headway.daemon.node.hardware import find_devices
from headway.daemon.plan.schedule_choice import check_named
from headway.daemon.reports.job_report import duration
from headway.daemon.reports.metrics_file import written
from headway.daemon.study.study_file import Cell, Study, read_study
from headway.daemon.study.study_results import wanted
from headway.stages.errors import NonFiniteLossError
from headway.stages.spec import TrainSpec

RESULTS_NAME: Final = "results.jsonl"
JOBS_NAME: Final = "jobs"
WHOLE: Final = ("train.", "optim.")
"""Sections of which a job file here has every key: their defaults may be others tomorrow."""
HELD_OUT_TOKENS: Final = 1 << 17
"""Of which each training's loss is the mean, if the data holds so many out."""
CURVE_POINTS: Final = 100
"""Of a row, each the mean of as many batches."""
ROW_BEGINS: Final = b'{"optimizer":'
TIMED_BATCHES: Final = 6
"""Trained before a new study, to say how long it takes."""
POLL_S: Final = 0.5
LEAST_TIMED_S: Final = 20.0
"""After so long the time that is left can be told."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one cell ends at."""

    optimizer: str
    treatment: str
    factor: float
    seed: int
    job: str
    """Its job file, with what is a default today: a row counts as long as the study's job is still the same one."""
    loss: float | None
    """Of held-out text after the last update, nats per token; None: the training diverged."""
    losses_sha256: str
    """Of the losses of all batches, as JSON: equal bits have equal ones."""
    curve: tuple[float, ...]
    """Training losses, thinned."""
    seconds: float
    weights_sha256: str = ""
    """Of the model's folder that it begins with; empty: its weights are random, or an earlier release wrote the row."""

    @property
    def cell(self) -> Cell:
        """Return the cell that it is of."""
        return Cell(optimizer=self.optimizer, treatment=self.treatment, factor=self.factor, seed=self.seed)


def open_study(path: Path) -> Study:
    """Return the study of a file, its jobs as `submit` would have them on this machine's CPU. Raises ConfigError."""
    devices = find_devices("cpu", 0)
    origins: dict[str, OriginSpec] = {}
    """With the digests of their parts: each is read once."""

    def resolve(spec: JobSpec, named: frozenset[str]) -> JobSpec:
        wheel = (path.parent / Path(spec.plugins.wheel).expanduser()).resolve()
        spec = resolve_job(spec, job_file=path, devices=devices, cache_dir=default_cache_dir(), named=named)
        if (key := repr((spec.origin, spec.model, spec.train.dtype))) not in origins:
            origins[key] = read_parts(spec).origin
        spec = replace(spec, origin=origins[key])
        return spec.with_values({"plugins.wheel": str(wheel)}) if spec.plugins.sha256 else spec

    study = read_study(path, open_model=model_opener(path.parent), resolve=resolve)
    check_named(study.jobs.values(), str(path))
    for kind, spec in study.jobs.items():
        check_memory(spec, f"{path} ({', '.join(kind)})")
    return study


def run_study(
    study: Study, out: Path, *, processes: int, tell: Callable[[str], object], progress: IO[str] | None
) -> dict[Cell, Row]:
    """Train what is still wanted; return all rows. tell: is told first how long it takes. progress: stream for a line
    that overwrites itself.

    Raises ConfigError: the folder is in use, or cannot be written to. Raises JobFailedError: a plug-in fails. Ctrl-C
    loses the cells in progress alone, and is told.
    """
    with _results_file(out) as results:
        rows = read_results(out / RESULTS_NAME, study)
        with written(str(out)):
            for row in rows.values():
                write_job(out / JOBS_NAME, row)
        if not (todo := wanted(study, losses_of(rows))):
            return rows
        with errors_told(todo[0].told, todo[0].told):
            each_s = statistics.fmean(row.seconds for row in rows.values()) if rows else _timed(study.job(todo[0]))
        left = max(study.most_cells - len(rows), len(todo))
        many = f"{counted(left, 'training')} at most, {processes} at a time, of {each_s:,.0f} s each"
        tell(f"{len(rows)} done; {many}: about {duration(left * each_s / processes)}")
        try:
            with _Pool(processes, progress) as pool:
                while todo:
                    for cell, (losses, end, seconds) in pool.trained({cell: study.job(cell) for cell in todo}):
                        rows[cell] = _row(cell, study.job(cell), losses, end, seconds, jobs=out / JOBS_NAME)
                        with written(str(out)):
                            results.write(msgspec.json.encode(rows[cell]) + b"\n")
                            results.flush()
                            write_job(out / JOBS_NAME, rows[cell])
                    todo = wanted(study, losses_of(rows))
        except KeyboardInterrupt:
            done = f"{counted(len(rows), 'training')} done ({out / RESULTS_NAME})"
            tell(f"stopped with {done}; the same command goes on from there")
            raise
    return rows


def losses_of(rows: Mapping[Cell, Row]) -> dict[Cell, float]:
    """Return the losses that the cells end at."""
    return {cell: math.inf if row.loss is None else row.loss for cell, row in rows.items()}


def read_results(path: Path, study: Study) -> dict[Cell, Row]:
    """Return the rows of the study's cells whose job is still the same. A torn last line does not count. Raises
    ConfigError.
    """
    if not path.exists():
        return {}
    rows: dict[Cell, Row] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.MsgspecError as error:
            what = f"line {number} is no result of a study: {error}; mend it, or name another folder with --out"
            raise ConfigError(what, str(path)) from error
        cell = row.cell
        if cell in study and is_job(row, study.job(cell), jobs=path.parent / JOBS_NAME):
            rows[cell] = row
    return rows


def train(spec: JobSpec, on_batch: Callable[[BatchResult], None]) -> None:
    """Train a job in this process, as `headway reference` does. Raises as that."""
    import_plugins(spec, Path(spec.plugins.data.source))
    tokens = tokens_here(spec)
    num_rows = tokens.validation.num_rows(spec.train) if tokens.validation is not None else 0
    if not num_rows:
        what = f"holds no row of {spec.train.sequence_length} tokens out, and a study compares held-out losses"
        what += "; prepare it with a larger --validation"
        raise ConfigError(what, spec.data.parts[0].source)
    reference(
        spec,
        tokens,
        on_batch=on_batch,
        initial=initial_weights_of(spec),
        adapters=initial_adapters_of(spec),
        last_evaluated=held_out_microbatches(num_rows, spec.train),
    )


def held_out_microbatches(num_rows: int, train: TrainSpec) -> int:
    """Return how many microbatches each training is compared on, of a split with so many rows."""
    of_tokens = HELD_OUT_TOKENS // (train.microbatch_size * train.sequence_length)
    return max(1, min(of_tokens, num_rows // train.microbatch_size))


Ended = tuple[list[float], float | None, float]
"""Losses of all batches, the held-out one after them (None: it diverged), and seconds."""
_num_batches: "Synchronized[int]"
"""Of a process of the pool: counts the batches of all."""


def _begin(num_batches: "Synchronized[int]") -> None:
    """Begin a process of the pool, which ends with the one that started it, however that ends."""
    global _num_batches
    _num_batches = num_batches
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep a Ctrl-C for the end of the block. Processes that begin in it never get one: it is for this one alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _trained(spec: JobSpec) -> Ended:
    """Train a cell in a process of the pool."""
    losses: list[float] = []
    end: float | None = None

    def on_batch(result: BatchResult) -> None:
        nonlocal end
        losses.append(result.loss)
        end = result.final_eval_loss
        with _num_batches.get_lock():
            _num_batches.value += 1

    started = time.perf_counter()
    try:
        train(spec, on_batch)
    except NonFiniteLossError:
        end = None
    return losses, end if end is None or math.isfinite(end) else None, time.perf_counter() - started


class _Pool:
    """Processes that train. A context manager: leaving it early ends them."""

    def __init__(self, processes: int, progress: IO[str] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._num_batches: Synchronized[int] = context.Value("q", 0)
        self._progress = progress
        self._pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(self._num_batches,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in multiprocessing.active_children():
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        if self._progress is not None:
            self._progress.write("\r\x1b[K")

    def trained(self, jobs: Mapping[Cell, JobSpec]) -> Iterator[tuple[Cell, Ended]]:
        """Yield each cell when it is done. Raises ConfigError when a process dies, JobFailedError for a plug-in."""
        with _without_interrupts():
            cells: dict[Future[Ended], Cell] = {self._pool.submit(_trained, spec): cell for cell, spec in jobs.items()}
        total, before = sum(spec.train.batches for spec in jobs.values()), self._num_batches.value
        waiting, started = {*cells}, time.monotonic()
        while waiting:
            ended, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            done, seconds = self._num_batches.value - before, time.monotonic() - started
            left = (
                f"  about {duration(seconds * (total - done) / done)} left" if done and seconds > LEAST_TIMED_S else ""
            )
            self._tell(f"{bar(done, total)}  {len(cells) - len(waiting)} of {counted(len(cells), 'training')}{left}")
            for future in ended:
                told = cells[future].told
                try:
                    with errors_told(told, told):
                        result = future.result()
                except BrokenProcessPool as error:
                    what = "its process was ended, perhaps for want of memory; go on with fewer --processes"
                    raise ConfigError(what, told) from error
                yield cells[future], result

    def _tell(self, text: str) -> None:
        if self._progress is not None:
            self._progress.write(f"\r{text}\x1b[K")
            self._progress.flush()


class _EnoughError(Exception):
    """The batches that were to be timed are done."""


def _timed(spec: JobSpec) -> float:
    """Return the seconds that a job takes, by its first batches."""
    seconds: list[float] = []

    def on_batch(result: BatchResult) -> None:
        seconds.append(result.seconds)
        if len(seconds) == TIMED_BATCHES:
            raise _EnoughError

    with suppress(_EnoughError, NonFiniteLossError):
        train(spec, on_batch)
    return statistics.median(seconds or [0.0]) * spec.train.batches


def _row(cell: Cell, spec: JobSpec, losses: Sequence[float], end: float | None, seconds: float, *, jobs: Path) -> Row:
    text = job_text(spec, whole=WHOLE)
    folder = spec.origin.adapter or spec.origin.url
    for path in (folder, spec.plugins.wheel, *(part.source for part in spec.data.parts)):
        if Path(path).is_absolute():  # a path from the job file on says nothing of this machine
            text = text.replace(f'"{path}"', f'"{os.path.relpath(path, jobs)}"')
    return Row(
        optimizer=cell.optimizer,
        treatment=cell.treatment,
        factor=cell.factor,
        seed=cell.seed,
        job=text,
        loss=end,
        losses_sha256=losses_sha256(losses),
        curve=thinned(losses),
        seconds=round(seconds, 1),
        weights_sha256=_weights_sha256(spec),
    )


def _weights_sha256(spec: JobSpec) -> str:
    """Return one hash of the layers of a model's folder; empty: the job has none."""
    parts = [f"{part.name} {part.checksum}" for part in spec.origin.parts if part.name in spec.layers]
    return sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def is_job(row: Row, spec: JobSpec, *, jobs: Path) -> bool:
    """Return whether a row's cell was trained as this job, wherever its data lay. One that no release can read any more
    was not. jobs: folder of the job files.
    """
    try:
        was = parse_job(row.job, open_model=model_opener(jobs))
    except ConfigError:
        return False
    return _compared(was) == _compared(spec) and row.weights_sha256 in ("", _weights_sha256(spec))


def _compared(spec: JobSpec) -> dict[str, object]:
    """Return what two jobs that train alike have in common. A model is known by its place too, the rest by its
    contents alone.
    """
    by_contents = ("data.source", "data.sources", "plugins.wheel")
    values = {key: value for key, value in values_of(spec).items() if key not in by_contents}
    return values | {"data.weights": spec.data.weights, "model.from": (spec.origin.url, spec.origin.adapter)}


def write_job(folder: Path, row: Row) -> None:
    """Write the job file of a cell. Raises OSError."""
    folder.mkdir(exist_ok=True)
    (folder / row.cell.file_name).write_text(f"# {row.cell.told}\n{row.job}", encoding="utf-8")


def losses_sha256(losses: Sequence[float]) -> str:
    """Return one hash of all losses: equal for equal bits."""
    return sha256(json.dumps([*losses]).encode()).hexdigest()


def thinned(losses: Sequence[float]) -> tuple[float, ...]:
    """Return at most CURVE_POINTS means of losses that follow each other."""
    length = -(-len(losses) // CURVE_POINTS)
    parts = (losses[start : start + length] for start in range(0, len(losses), max(1, length)))
    return tuple(round(statistics.fmean(part), 4) for part in parts)


@contextmanager
def _results_file(out: Path) -> Iterator[IO[bytes]]:
    """Open the results to be continued, for one process at a time; a torn last line is cut off. Raises ConfigError."""
    path = out / RESULTS_NAME
    with written(str(path)):
        out.mkdir(parents=True, exist_ok=True)
        results = path.open("a+b")
    try:
        with written(str(path)):
            fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
            results.seek(0)
            whole, newline, torn = results.read().rpartition(b"\n")
            if not ROW_BEGINS.startswith(torn[: len(ROW_BEGINS)]):  # another file, which nobody wants shortened
                raise ConfigError("is no file of results; name another folder with --out", str(path))
            results.truncate(len(whole + newline))
        yield results
    finally:
        with written(str(path)):  # what a full disk did not take
            results.close()
