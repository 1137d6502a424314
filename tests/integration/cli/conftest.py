"""`headway` as a program of its own, with everything that it starts marked, so that what it leaves behind is found."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.rigs.programs import MARK, marked, write_tokens

JOB = """\
[job]
name = "{name}"
seed = 3
[model]
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{data}"
[train]
batches = {batches}
microbatches = 4
microbatch_size = 2
sequence_length = 16
[optim]
warmup_batches = 2
[placement]
min_nodes = {min_nodes}
"""
TIMEOUT_S = 110.0


class Program:
    """Runs command lines in one folder, and looks for what they left."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self._data = data
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []

    def job(self, *, name: str = "tiny", batches: int = 5, min_nodes: int = 1, more: str = "") -> Path:
        """A small job's file."""
        path = self.folder / f"{name}.toml"
        path.write_text(JOB.format(name=name, data=self._data, batches=batches, min_nodes=min_nodes) + more)
        return path

    def environment(self) -> dict[str, str]:
        """The variables of a process of this program."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        return environment | {MARK: self._mark, "TMPDIR": str(self.folder / "tmp"), "HEADWAY_NUM_SPARES": "0"}

    def start(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command line; its stdout and stderr are pipes. variables: of its environment."""
        environment = self.environment() | dict(variables or {})
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.daemon.cli.main", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command line to its end: (exit code, stdout, stderr)."""
        return self.ended(self.start(*arguments))

    def ended(self, process: "subprocess.Popen[str]") -> tuple[int, str, str]:
        """The outcome of a command line that was started, once it has ended."""
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def up(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `headway up` and return when it says that it is up."""
        process = self.start("up", *arguments, variables=variables)
        assert process.stdout is not None
        line = process.stdout.readline()
        if " up; etcd at " not in line:
            raise AssertionError(f"{line}{process.communicate(timeout=TIMEOUT_S)[1]}")
        return process

    def workers(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self.pids("headway.daemon.worker")

    def pids(self, what: str) -> list[int]:
        """Process ids of those that run now with these words in their command."""
        return [pid for pid in self._marked() if what in _command(pid)]

    def leftovers(self, *, within_s: float = 0.0) -> list[str]:
        """Processes, folders and sockets of this program that are still there after at most `within_s`."""
        deadline = time.monotonic() + within_s
        while (found := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """Kill whatever is left; the sweepers of killed clusters get the time to do their work."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=TIMEOUT_S)
        self.leftovers(within_s=10)
        for pid in self._marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def _leftovers(self) -> list[str]:
        found = [f"process {pid}: {_command(pid)}" for pid in self._marked()]
        found += [f"folder {path}" for path in (self.folder / "tmp").glob("headway-*")]
        pids = {str(process.pid) for process in self._started}
        found += [f"folder {path}" for path in Path("/dev/shm").glob("headway-*") if path.name.split("-")[1] in pids]
        return found

    def _marked(self) -> list[int]:
        """Processes, other than those started here, with our mark in their environment; zombies do not count."""
        own = {process.pid for process in self._started if process.poll() is None}
        return marked(self._mark, but=own)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of token shards."""
    return write_tokens(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def program(data: Path) -> Iterator[Program]:
    """The command line in a fresh folder with a short path; nothing of it is left after the test."""
    program = Program(Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp")), data)
    yield program
    program.end()


@pytest.fixture(scope="package")
def standing(data: Path) -> Iterator[Program]:
    """A program with two nodes up, for tests that leave them as they were and name their jobs differently."""
    program = Program(Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp")), data)
    try:
        program.up("--nodes", "2")
        yield program
    finally:
        program.end()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Waits for a claim to become true; fails, naming it, after a deadline."""

    def wait(claim: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not claim():
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
            time.sleep(0.05)

    return wait
