"""What the workers did and when: the lines from which delay, versions, counts and rollbacks can be checked.

A line is one JSON object. All have these fields:

`node`, `pid`, `incarnation`  whose line it is: the worker process's
`job`, `timeline`, `generation`, `stage`  of the Start in force
`worker`  the position among its plan's workers

A line about an operation has `op` (`forward`, `backward`, `update`), `batch`, `microbatch` (null for an update),
`version` (the weight version that it read), `versions_live`, `started` and `ended` (seconds of CLOCK_MONOTONIC).

A line about anything else has `event` and `at` (seconds of CLOCK_MONOTONIC), and

`loaded`  `layer`, `boundary`, `source` (`live`, `initial`, `path`), `source_timeline`: what is about to be loaded
`started`  `boundary`, `furthest`, `layers`
`stopped`  `boundary`
`aborted`  `batch`, `reason`: also when a neighbour was lost or the loss was not finite
`snapshot_written`  `boundary`, `layers`, `checksum` (a list, in the order of the layers)
`snapshot_missed`  `boundary`, `reason`, `factor`: it was not written
`snapshot_late`  the same: it was written, and later ones are further apart
"""

import errno
import json
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Final

from headway.stages.schedule.operations import BatchOp, Op

MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 512 << 20
MAX_PENDING_BYTES = 16 << 20
"""Most that waits for a disk which takes nothing just now."""
SUFFIX = ".jsonl"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that takes nothing now and may take something later."""


class HistoryFile:
    """Appends lines to one process's own file, `<name>-0000.jsonl`, then `-0001`, and so on.

    Each line is one write to the kernel, so that a killed process loses none. The oldest files of the folder go when
    it has grown too large. Lines that a full disk does not take wait for the next line; when too much waits, the
    history ends. The computation goes on.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        node: str = "",
        incarnation: str = "",
        max_file_bytes: int = MAX_FILE_BYTES,
        max_folder_bytes: int = MAX_FOLDER_BYTES,
    ) -> None:
        """Raises OSError when the folder or the file cannot be made."""
        self.trouble = ""
        """Reason why the history has ended."""
        self._folder = folder
        self._name = name
        self._max_file_bytes = max_file_bytes
        self._max_folder_bytes = max_folder_bytes
        self._process = {"node": node, "pid": os.getpid(), "incarnation": incarnation}
        self._common = _inside(self._process)
        self._number = -1
        self._descriptor = -1
        self._size = 0
        self._pending: deque[bytes] = deque()
        """Lines that the disk has not taken yet. The first may be there in part, and goes on in the same file."""
        self._num_pending_bytes = 0
        self._is_torn = False
        folder.mkdir(parents=True, exist_ok=True)
        self._open_next()

    def begin(self, *, job: str, timeline: int, generation: int, stage: int, worker: int) -> None:
        """Begin lines about another start."""
        about = {"job": job, "timeline": timeline, "generation": generation, "stage": stage, "worker": worker}
        self._common = _inside(self._process | about)

    def record(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """Write an operation's line."""
        kind = type(op)
        microbatch = "null" if isinstance(op, BatchOp) else op.microbatch
        self.write(
            f'{{{self._common}, "op": "{kind.__name__.lower()}", "batch": {op.batch}, "microbatch": {microbatch}, '
            f'"version": {version}, "versions_live": {num_versions_live}, '
            f'"started": {started:.6f}, "ended": {ended:.6f}}}\n'
        )

    def event(self, name: str, **fields: object) -> None:
        """Write the line of something that is no operation."""
        self.write(f"{{{self._common}, {_inside({'event': name, 'at': perf_counter()} | fields)}}}\n")

    def close(self) -> None:
        """Nothing is written from now on. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, line: str) -> None:
        """Write a line, with its line end. Raises nothing: `trouble` says why the history has ended."""
        if self._descriptor < 0:
            return
        encoded = line.encode()
        self._pending.append(encoded)
        self._num_pending_bytes += len(encoded)
        try:
            self._flush()
        except OSError as error:
            if self._num_pending_bytes > MAX_PENDING_BYTES or error.errno not in FULL:
                self.trouble = f"{self._folder / self._name}: {error.strerror}"
                self.close()

    def _flush(self) -> None:
        while self._pending:
            line = self._pending[0]
            if self._size + len(line) > self._max_file_bytes and self._size and not self._is_torn:
                self._open_next()
            num_written = os.write(self._descriptor, line)
            self._size += num_written
            self._num_pending_bytes -= num_written
            self._is_torn = num_written < len(line)
            if self._is_torn:
                self._pending[0] = line[num_written:]
            else:
                self._pending.popleft()

    def _open_next(self) -> None:
        path = self._folder / f"{self._name}-{self._number + 1:04d}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.close()
        self._number, self._descriptor, self._size = self._number + 1, descriptor, os.fstat(descriptor).st_size
        self._prune(path)

    def _prune(self, ours: Path) -> None:
        """Delete the oldest files, whoever wrote them. Another process may be doing the same."""
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        size = sum(num_bytes for _, num_bytes, _ in found)
        for _, num_bytes, path in sorted(found):
            if size <= self._max_folder_bytes:
                return
            if path != ours:
                path.unlink(missing_ok=True)
                size -= num_bytes


def _inside(fields: dict[str, object]) -> str:
    """The members of a JSON object, without its braces."""
    return json.dumps(fields)[1:-1]
