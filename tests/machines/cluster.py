"""A cluster of several machines, set up as docs/deployment.md says: an etcd, a daemon on each, certificates by name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.daemon.etcd.binary import find_etcd_binary
from headway.daemon.rpc.certificates import CertificateAuthority
from tests.machines.network import Network

TIMEOUT_S = 120.0
DAEMON_PORT, WORKER_PORTS, ETCD_PORT = 7070, "7100-7107", 2379
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
class Cluster:
    """etcd and the person live on the first machine, which has a daemon as every other."""

    network: Network
    folder: Path
    data: Path
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _asker: "subprocess.Popen[str] | None" = None
    _person: "subprocess.Popen[str] | None" = None

    def __post_init__(self) -> None:
        self.authority = CertificateAuthority.create(self.folder / "ca")
        for machine in self.network.machines.values():
            self.authority.issue(machine.name, hosts=(machine.address,))
        first = self.network.machines[self.names[0]]
        self.authority.issue("etcd", hosts=(first.address,))
        self.authority.issue("me")
        self.etcd = f"{first.address}:{ETCD_PORT}"

    @property
    def names(self) -> list[str]:
        """Return the names of the machines, which are those of their daemons."""
        return list(self.network.machines)

    def start(self) -> None:
        """etcd, then every daemon behind its firewall; returns when all are registered with a worker each."""
        for name in self.names:
            self.network.allow_only(name, [str(DAEMON_PORT), WORKER_PORTS])
        self.network.allow_always(self.names[0], ETCD_PORT)
        self._start_etcd()
        for name in self.names:
            self.start_daemon(name)
        self._asker = self._helper("asker.py", self.etcd, str(self.folder / "ca" / "me"))
        self._person = self._helper("person.py")
        self.all_up()

    def start_daemon(self, name: str, *, certificate: str = "", **flags: object) -> "subprocess.Popen[bytes]":
        """Start as the deployment page says. certificate: another one than its own."""
        machine = self.network.machines[name]
        told = {
            "etcd": self.etcd,
            "certs": self.folder / "ca" / (certificate or name),
            "name": name,
            "listen": f"0.0.0.0:{DAEMON_PORT}",
            "advertise-host": machine.address,
            "worker-ports": WORKER_PORTS,
            "site": name,
            "state-dir": self.folder / name,
            "store-dir": self.folder / name / "store",
            "num-spares": 0,
            "num-devices": 1,
        } | {key.replace("_", "-"): value for key, value in flags.items()}
        arguments = [f"--{key}={value}" for key, value in told.items()]
        command = self._inside(name, sys.executable, "-m", "headway.daemon.cli.main", "daemon", *arguments)
        return self._spawn(name, command)

    def stop_daemon(self, name: str) -> None:
        """SIGKILL, as when a machine loses power; its workers go with it."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(TIMEOUT_S)

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
        checkpoints = self.folder / "checkpoints"
        about = {"name": name, "batches": batches, "min_nodes": min_nodes, "checkpoints": checkpoints}
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
        self.until(lambda told: not blocked(told) and len(told["reach"]) == len(self.names), "every way open")

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

    def _start_etcd(self) -> None:
        host, certificates = self.network.machines[self.names[0]].address, self.folder / "ca" / "etcd"
        urls = f"https://{host}:{ETCD_PORT}"
        command = [
            str(find_etcd_binary()), "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", urls,
            "--advertise-client-urls", urls, "--client-cert-auth", "--trusted-ca-file", f"{certificates}/ca.pem",
            "--cert-file", f"{certificates}/cert.pem", "--key-file", f"{certificates}/key.pem", "--unsafe-no-fsync",
        ]  # fmt: skip
        self._spawn("etcd", self._inside(self.names[0], *command))

    def _spawn(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment())
        self._processes[name] = process
        return process

    def _helper(self, script: str, *arguments: str) -> "subprocess.Popen[str]":
        """A process on the first machine that answers each line with one."""
        command = self._inside(self.names[0], sys.executable, str(Path(__file__).with_name(script)), *arguments)
        environment = {**_environment(), "HEADWAY_ETCD": self.etcd, "HEADWAY_CERTS": str(self.folder / "ca" / "me")}
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _inside(self, name: str, *command: str) -> list[str]:
        """`ip netns exec` becomes what it runs, so that a signal to it is one to that."""
        return ["ip", "netns", "exec", self.network.machines[name].namespace, *command]


def blocked(told: Any) -> list[str]:
    """The ways that the present daemons have found blocked: `b → d worker at 10.78.0.4:7100: …`."""
    nodes = told["nodes"]
    return [
        f"{source} → {fact['to']} {fact['port']} at {fact['address']}: {fact['reason']}"
        for source, record in told["reach"].items()
        for fact in record["facts"]
        if fact["reason"] and fact["to"] in nodes and fact["to_incarnation"] == nodes[fact["to"]]["incarnation"]
    ]


def stop_worker(told: Any, name: str) -> None:
    """SIGKILL to a node's only worker, wherever it is in its life."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        is_worker = b"headway.daemon.worker" in words
        if is_worker and words[words.index(b"--host") + 1].decode() == told["nodes"][name]["host"]:
            os.kill(int(entry.name), signal.SIGKILL)


def _answer(helper: "subprocess.Popen[str] | None", line: str) -> Any:
    assert helper is not None
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.write(f"{line}\n")
    helper.stdin.flush()
    return json.loads(helper.stdout.readline())


def _unfinished(told: Any) -> list[str]:
    return [name for name, job in told["jobs"].items() if job["phase"] not in ("finished", "failed", "cancelled")]


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    quiet = {"PYTHONSAFEPATH": "1", "GRPC_VERBOSITY": "NONE"}
    return own | quiet | {"HEADWAY_ACCEPT_FAULTY_ETCD": "true"}  # of the binary that pip brings
