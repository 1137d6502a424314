"""Writes a boundary's files in its own thread, while the next batches are computed.

No tensor of boundary b changes between update(b-1) and update(b). On a CPU the tensors are read in place, and the
caller runs no update until `SnapshotEnded` has arrived. On other devices they are copied to the host first, and updates
wait for that copy only.
A cancelled snapshot may read torn content: none of its files gets a name, or keeps it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

from torch import Tensor

from headway.stages.device.device import DeviceLateError, HostCopy
from headway.stages.ids import Boundary, Generation, LayerName, Timeline
from headway.stages.state.layer_file import SUFFIX
from headway.stages.state.state_file import StateHeader, WriteCancelledError, WrittenFile, to_host, write_state

COPYING_S: Final = 120.0
"""Maximum wait for the copy to the host, which moves gigabytes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEnded:
    """All files of a boundary are in place, or none is left."""

    job: str
    generation: Generation
    timeline: Timeline
    boundary: Boundary
    files: Mapping[LayerName, WrittenFile] = field(default_factory=dict)
    trouble: str = ""
    """Reason why there are no files."""


class Reports(Protocol):
    """Receives SnapshotEnded, or the writer's own failure. Must never block: `queue.SimpleQueue` fits."""

    def put(self, item: "SnapshotEnded | BaseException") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The tensors of each layer to write: live, or described by tensors without content."""

    folder: Path
    headers: Mapping[LayerName, StateHeader]
    tensors: Mapping[LayerName, Mapping[str, Tensor]]
    job: str
    generation: Generation
    timeline: Timeline
    boundary: Boundary
    fetch: Callable[[Tensor], Sequence[Tensor]] = to_host
    """Returns the content of a tensor, as `write_state` wants it."""
    copy: HostCopy | None = None
    """Copy to the host that must be done before `fetch`; None: there is none."""


@dataclass(slots=True)
class _Task:
    snapshot: Snapshot
    is_wanted: bool = True
    done: threading.Event = field(default_factory=threading.Event)


class SnapshotWriter:
    """One thread, one snapshot at a time. All methods may be called from any thread."""

    def __init__(
        self,
        reports: Reports,
        *,
        on_file: Callable[[Snapshot, LayerName], None] = lambda _snapshot, _layer: None,
        on_done: Callable[[Snapshot], None] = lambda _: None,
    ) -> None:
        """on_file, on_done: are called in the writer's thread when a file, or all of them, are in place."""
        self._reports = reports
        self._on_file = on_file
        self._on_done = on_done
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._current: _Task | None = None
        self._thread = threading.Thread(target=self._main, name="headway-snapshots", daemon=True)

    @property
    def is_free(self) -> bool:
        """Return whether a snapshot can begin."""
        with self._lock:
            return self._current is None

    def begin(self, snapshot: Snapshot) -> bool:
        """Write in the background; its end is reported. Returns False, and does nothing, while another is being
        written.
        """
        with self._lock:
            if self._current is not None:
                return False
            self._current = _Task(snapshot)
            if not self._thread.is_alive():
                self._thread.start()
            self._tasks.put(self._current)
        return True

    def report(self, item: SnapshotEnded) -> None:
        """Tell of a snapshot that did not begin, or was given up, in the way of those that end."""
        self._reports.put(item)

    def cancel(self, *, timeout_s: float) -> bool:
        """Cancel the current snapshot: it reports nothing and keeps no name from now on.

        Waits until its tensors are released; returns False when that took too long.
        """
        with self._lock:
            task = self._current
            if task is None:
                return True
            task.is_wanted = False
        return task.done.wait(timeout_s)

    # --- in the writer's thread -------------------------------------------------------------------------------------

    def _main(self) -> None:
        while True:
            self._run(self._tasks.get())

    def _run(self, task: _Task) -> None:
        snapshot, written = task.snapshot, dict[LayerName, WrittenFile]()
        new: list[Path] = []
        ended: SnapshotEnded | BaseException | None
        try:
            self._write(task, written, new)
            ended = _ended(snapshot, written)
        except WriteCancelledError:
            ended = None
        except OSError as error:
            ended = _ended(snapshot, {}, trouble=f"{snapshot.folder}: {error.strerror or error}")
        except DeviceLateError as error:
            ended = _ended(snapshot, {}, trouble=str(error))
        except BaseException as error:  # the worker's main thread raises any error
            ended = error
        with self._lock:
            is_kept = task.is_wanted and isinstance(ended, SnapshotEnded) and not ended.trouble
            if not is_kept:
                _remove(snapshot.folder, new)
            self._current = None
            if task.is_wanted and ended is not None:
                self._reports.put(ended)
        task.done.set()

    def _write(self, task: _Task, written: dict[LayerName, WrittenFile], new: list[Path]) -> None:
        """Write the files. new: receives those that were not there before; others may have been reported."""
        snapshot = task.snapshot
        if snapshot.copy is not None:
            snapshot.copy.wait(COPYING_S)
        snapshot.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for layer, tensors in snapshot.tensors.items():
            path = snapshot.folder / f"{layer}{SUFFIX}"
            was_there = path.exists()
            written[layer] = write_state(
                path,
                tensors,
                snapshot.headers[layer],
                fetch=snapshot.fetch,
                is_wanted=lambda: task.is_wanted,
            )
            if not was_there:
                new.append(path)
            self._on_file(snapshot, layer)
        self._on_done(snapshot)


def _ended(snapshot: Snapshot, files: Mapping[LayerName, WrittenFile], *, trouble: str = "") -> SnapshotEnded:
    return SnapshotEnded(
        job=snapshot.job,
        generation=snapshot.generation,
        timeline=snapshot.timeline,
        boundary=snapshot.boundary,
        files=dict(files),
        trouble=trouble,
    )


def _remove(folder: Path, files: Iterable[Path]) -> None:
    """Remove an incomplete snapshot: it is useless, and blocks a complete one."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
