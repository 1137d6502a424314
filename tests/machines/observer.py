"""What a test sees of a cluster on several machines, and does to it: looks into etcd, commands of a person, logs."""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
JOB = """\
[job]
name = "{name}"
seed = 5
[model]
num_hidden_layers = 6
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{data}"
[train]
batches = {batches}
microbatches = 8
microbatch_size = 2
sequence_length = 16
[optim]
warmup_batches = 2
[placement]
min_nodes = {min_nodes}
recut = false
[fault]
checkpoint_dir = "{checkpoints}"
snapshot_every = 10
checkpoint_every = 1000000
"""


@dataclass
class Observer(ABC):
    """Processes on machines, and two helpers on one of them: one looks into etcd, one runs commands."""

    folder: Path
    data: Path
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict, init=False)
    _asker: "subprocess.Popen[str] | None" = field(default=None, init=False)
    _person: "subprocess.Popen[str] | None" = field(default=None, init=False)
    etcd: str = field(default="", init=False)
    """What `--etcd` takes."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the daemons."""

    @property
    @abstractmethod
    def desk(self) -> str:
        """Return the machine where the person sits."""

    @property
    @abstractmethod
    def own_certificates(self) -> Path:
        """Return the person's certificates."""

    @abstractmethod
    def inside(self, machine: str, *command: str) -> list[str]:
        """Return the command that runs a command on a machine, and becomes it: a signal to it is one to that."""

    @property
    def checkpoints(self) -> Path:
        """Return the folder that all machines see."""
        return self.folder / "checkpoints"

    def meet(self) -> None:
        """Seat the person and the one who looks into etcd."""
        self._asker = self._helper("asker.py", self.etcd, str(self.own_certificates))
        self._person = self._helper("person.py")

    def stop_daemon(self, name: str) -> None:
        """SIGKILL, as when a machine loses power; its workers go with it."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(TIMEOUT_S)

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return a daemon, or a member of etcd."""
        return self._processes[name]

    def log(self, name: str) -> str:
        """Return the output of a daemon, or of etcd."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def headway(self, *arguments: str) -> tuple[int, str]:
        """Run a command; return (exit code, stdout and stderr)."""
        code, said = _answer(self._person, json.dumps(arguments))
        return code, said

    def submit(self, name: str, *, batches: int, min_nodes: int) -> Path:
        """A small job; returns its file."""
        path = self.folder / f"{name}.toml"
        about = {"name": name, "batches": batches, "min_nodes": min_nodes, "checkpoints": self.checkpoints}
        path.write_text(JOB.format(data=self.data, **about))
        code, said = self.headway("submit", str(path))
        assert code == 0, said
        return path

    def look(self) -> Any:
        """Return the content of etcd now."""
        return _answer(self._asker, "")

    def until(self, claim: Callable[[Any], Any], what: str, *, within_s: float = TIMEOUT_S) -> Any:
        """Return the content of etcd once a claim about it holds; fail with the last content."""
        deadline = time.monotonic() + within_s
        while not claim(told := self.look()):
            ended = {name: self.log(name)[-500:] for name, process in self._processes.items() if process.poll()}
            assert not ended, ended
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}; {json.dumps(told, indent=1)}"
            time.sleep(0.2)
        return told

    def all_up(self) -> None:
        """Every daemon is registered, its worker listens, and nobody knows of a way that is blocked."""

        def are_up(told: Any) -> bool:
            nodes = told["nodes"]
            return nodes.keys() >= set(self.names) and all(node["workers"] for node in nodes.values())

        self.until(are_up, "all nodes up")
        self.until(lambda told: not blocked(told), "no way blocked")

    def until_batch(self, job: str, batch: int) -> Any:
        """Once a job has come so far."""

        def has_come(told: Any) -> bool:
            assert told["jobs"][job]["phase"] != "failed", told["jobs"][job]
            return bool(told["jobs"][job]["batch"] >= batch)

        return self.until(has_come, f"{job} at batch {batch}")

    def finished(self, job: str) -> Path:
        """The model of a job, once it has finished."""
        told = self.until(lambda told: job not in _unfinished(told), f"the end of {job}", within_s=2 * TIMEOUT_S)
        assert told["jobs"][job]["phase"] == "finished", told["jobs"][job]
        out = self.folder / f"{job}-model"
        code, said = self.headway("export", job, "--out", str(out))
        assert code == 0, said
        return out

    def nothing_is_left(self) -> None:
        """Check that no jobs and failures are left: a case costs the next one nothing."""
        for name in _unfinished(self.look()):
            self.headway("cancel", name)
        self.until(lambda told: not _unfinished(told), "the end of every job")
        for name in [name for name, found in self.look()["failures"].items() if found]:
            self.headway("nodes", "release", name)

    def end(self) -> None:
        """Nothing of it is left but the folder."""
        for process in self._processes.values():
            process.kill()
            process.wait(TIMEOUT_S)
        for helper in (self._asker, self._person):
            if helper is not None:
                helper.communicate(timeout=TIMEOUT_S)  # its end of input is its end

    def spawn(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())
        self._processes[name] = process
        return process

    def _helper(self, script: str, *arguments: str) -> "subprocess.Popen[str]":
        """A process on the first machine that answers each line with one."""
        command = self.inside(self.desk, sys.executable, str(Path(__file__).with_name(script)), *arguments)
        found = {**environment(), "HEADWAY_ETCD": self.etcd, "HEADWAY_CERTS": str(self.own_certificates)}
        return subprocess.Popen(command, env=found, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def assert_same_bits(model: Path, plain: dict[str, bytes]) -> None:
    """The exported weights are those of the plain loop, file by file."""
    assert plain
    assert {path.name for path in model.rglob("*.safetensors")} == plain.keys()
    assert [name for name, weights in plain.items() if (model / name).read_bytes() != weights] == []


def nobody_is_blamed(seen: Observer) -> None:
    """No failure counts against any node."""
    assert not any(seen.look()["failures"].values()), seen.look()["failures"]


def blocked(told: Any) -> list[str]:
    """The ways that the present daemons have found blocked: `b → d worker at 10.78.0.4:7100: …`."""
    nodes = told["nodes"]
    return [
        f"{source} → {fact['to']} {fact['port']} at {fact['address']}: {fact['reason']}"
        for source, record in told["reach"].items()
        for fact in record["facts"]
        if fact["reason"] and fact["to"] in nodes and fact["to_incarnation"] == nodes[fact["to"]]["incarnation"]
    ]


def _answer(helper: "subprocess.Popen[str] | None", line: str) -> Any:
    assert helper is not None
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.write(f"{line}\n")
    helper.stdin.flush()
    return json.loads(helper.stdout.readline())


def _unfinished(told: Any) -> list[str]:
    return [name for name, job in told["jobs"].items() if job["phase"] not in ("finished", "failed", "cancelled")]


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return own | {"PYTHONSAFEPATH": "1", "GRPC_VERBOSITY": "NONE"}
