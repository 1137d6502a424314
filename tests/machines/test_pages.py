"""The README and docs/deployment.md, word for word: their blocks run as they are printed, at the addresses they name.

Each machine is a network namespace with a folder of its own as home. What a block cannot do here is in LEFT_OUT, with
the reason; a block that is neither in RUN nor there fails the test before any runs, since it could change this machine.
"""

import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Final, Self

import pytest

from tests.machines.network import Network, ip

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCK: Final = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STAYS: Final = re.compile(r"etcd --data-dir|headway daemon --")
"""Commands that keep their terminal."""
DONE: Final = "that command ended with"
COMMAND_S: Final = 120.0
JOIN_S: Final = 60.0
"""A person tries again so long while a daemon starts."""
JOB: Final = """job.name = "my-job"
data.source = "headway-docs"
model = {{ num_hidden_layers = 2, hidden_size = 32, intermediate_size = 64, num_attention_heads = 4 }}
train = {{ batches = 20, microbatches = 2, microbatch_size = 2, sequence_length = 32 }}
fault.checkpoint_dir = "{folder}"
"""
RUN: Final = (
    "headway certs ca etcd=",
    "etcd --data-dir",
    "headway daemon --",
    "export HEADWAY_ETCD",
    "headway invite node-b",
    "headway invite ann",
    "headway doctor",
    "headway certs renew",
)
"""How the blocks of docs/deployment.md begin that run."""
LEFT_OUT: Final = {
    "python3 -m venv": "installs: tests/image and tests/booted do",
    "headway join hw1-… --relay": "relays: tests/machines/test_sites.py",
    "headway invite relay=": "relays: tests/machines/test_sites.py",
    "/opt/headway/bin/headway install": "a service: tests/booted",
    "headway certs ca etcd-1=": "three members: tests/machines/test_three_places.py",
    "headway invite --from": "dials by ssh",
    "install -D -m 600": "a service: tests/booted",
    "etcdctl member list": "has an ID and …",
    "printf '[Journal]": "changes this machine",
    "headway certs rotate": "tests/integration/daemon/test_authority_change.py",
    "etcd … --force-new-cluster": "has …",
    "etcdutl snapshot restore": "needs a backup",
    "systemctl stop headway": "a service: tests/booted",
    "headway daemon … --listen": "has …",
    "headway certs ca node-c=": "by hand what an invitation does",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]


def blocks_of(page: str) -> list[list[str]]:
    """Return the commands of each block of shell, as they are printed: continued lines are one."""
    return [
        [line for line in found.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]
        for found in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    ]


class Terminal:
    """A shell on a machine, in its home. Its words are read by a thread, so that no wait is for ever."""

    def __init__(self, namespace: str, home: Path) -> None:
        home.mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        self.home = home
        self._shell = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "setsid", "bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=home,
            env=kept | {"HOME": str(home), "PATH": path},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["pkill", "-KILL", "-s", str(self._session)], check=False, timeout=COMMAND_S)
        self._shell.kill()
        self._shell.wait(timeout=COMMAND_S)
        self._reader.join(timeout=COMMAND_S)
        with self._shell:  # closes both pipes
            pass

    @property
    def _session(self) -> int:
        return self._shell.pid

    def type(self, command: str) -> str:
        """Return what a command prints. One that stays gets `&`. AssertionError: it fails, or takes too long."""
        stays = STAYS.match(command) is not None
        text = f"{command.partition('  #')[0]} >>{self.home}/log 2>&1 &" if stays else command
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\necho '{DONE}' $?\n")
        self._shell.stdin.flush()
        told: list[str] = []
        ends = time.monotonic() + COMMAND_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{command}: still going after {COMMAND_S:g} s:\n{''.join(told)}") from None
            if line.startswith(DONE):
                assert line.split()[-1] == "0", f"{command}:\n{''.join(told)}"
                return "".join(told)
            told.append(line)

    def type_until_it_works(self, command: str) -> str:
        """Return what a command prints once the daemon that it needs is up."""
        ends = time.monotonic() + JOIN_S
        while True:
            try:
                return self.type(command)
            except AssertionError:
                if time.monotonic() > ends:
                    raise
                time.sleep(1.0)  # a person's pause, not a synchronisation: the next try decides

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Terminal]]:
    """Terminals on etcd's machine, on node-a, node-b, and those of two people on one more machine."""
    addresses = {"e": "10.0.0.5", "a": "10.0.0.7", "b": "10.0.0.9", "me": "10.0.0.11"}
    with ExitStack() as stack:
        network = stack.enter_context(Network.of(addresses))
        for name, address in addresses.items():
            ip("-n", network.machines[name].namespace, "address", "add", f"{address}/24", "dev", "eth0")
        machines = {name: machine.namespace for name, machine in network.machines.items()}
        machines["ann"] = machines["me"]
        yield {name: stack.enter_context(Terminal(where, tmp_path / name)) for name, where in machines.items()}


def join(person: Terminal, invite: str, machine: Terminal) -> str:
    """Invite a machine, and type there what is printed, and then what that prints, as people do; return the last."""
    (line,) = re.findall(r"^headway join hw1-\S+", person.type_until_it_works(invite), re.MULTILINE)
    told: set[str] = set(re.findall(r"headway daemon --config \S+ --certs \S+ --state-dir \S+", machine.type(line)))
    (daemon,) = told
    machine.type(daemon)
    return daemon


def write_job(person: Terminal, shared: Path) -> None:
    """The job of the pages, with the folder that all nodes see."""
    shared.mkdir()
    (person.home / "my-job.toml").write_text(JOB.format(folder=shared))


def test_the_readmes_own_machines(places: dict[str, Terminal], tmp_path: Path) -> None:
    """The block of `Use it`: etcd and the first node on one machine, another one joins, a job trains."""
    (block,) = [lines for lines in blocks_of("README.md") if any("certs ca etcd=10.0.0.7" in line for line in lines)]
    first = places["a"]
    write_job(first, tmp_path / "shared")
    for line in block:
        if line.startswith("headway invite"):
            join(first, line, places["b"])
            first.type_until_it_works("headway nodes | grep -q node-b")
        else:
            told = first.type(line)
    assert "finished" in told, "the last line watches the job to its end"


def test_the_deployment_page(places: dict[str, Terminal], tmp_path: Path) -> None:
    """Its blocks in their order, each on the machine that the page names; what it says to copy is copied."""
    etcd, first, other, person, ann = (places[name] for name in ("e", "a", "b", "me", "ann"))
    write_job(person, tmp_path / "shared")
    blocks, daemon = blocks_of("docs/deployment.md"), ""
    assert [block[0] for block in blocks if not block[0].startswith((*RUN, *LEFT_OUT))] == []
    for block in blocks:
        for line in block if block[0].startswith(RUN) else []:
            if line.startswith("headway certs ca etcd="):
                first.type(line)
                shutil.copytree(first.home / "ca/etcd", etcd.home / "certs")
                shutil.copytree(first.home / "ca/me", person.home / "ca/me")
            elif line.startswith("etcd "):
                etcd.type(line)
            elif line.startswith(("headway daemon --etcd", "headway certs list --ca")):
                first.type_until_it_works(line)
            elif line.startswith("headway invite ann"):
                (joining,) = re.findall(r"^headway join hw1-\S+", person.type(line), re.MULTILINE)
                (export,) = re.findall(r"export HEADWAY_\S+.*", ann.type(joining))
                ann.type(export)
            elif line.startswith("headway certs renew"):
                ann.type(line)
            elif line.startswith("headway certs restore"):
                person.type(line)
                other.type(daemon)  # a revoked node's daemon has ended; systemd would start it again
            elif line.startswith("headway invite node-b"):
                daemon = join(person, line, other)
            elif line.startswith(("headway daemon --config", "headway config show")):
                other.type("true" if "daemon" in line.split()[1] else line)  # the daemon runs since it joined
            else:
                for terminal in [person, first] if line.startswith("export ") else [person]:
                    terminal.type_until_it_works(line)
