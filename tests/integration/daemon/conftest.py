"""Real daemons against a real etcd, marked by an environment variable so that whatever they leave behind is found."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import Desired, DesiredRecord, Phase, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.stages.data.shard_index import read_index
from headway.stages.sockets.roles import Role
from headway.stages.spec import ModelSpec, TrainSpec
from tests.integration.conftest import Etcd
from tests.rigs.join_place import JoinPlace, join_place
from tests.rigs.node_network import Network, node_network
from tests.rigs.programs import MARK, marked, write_tokens

DEADLINE_S = 90.0
ValueT = TypeVar("ValueT")

MODEL = ModelSpec(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
)


@dataclass
class Playground:
    """Daemons, jobs and their end."""

    etcd: Any
    client: EtcdClient
    folder: Path
    data: Path
    role: Role | None = None
    """Role in the daemons' certificates; None: they name none."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def command(self, name: str, **flags: object) -> list[str]:
        """The command line of a node's daemon."""
        known: dict[str, object] = {
            "name": name,
            "etcd": self.etcd.endpoint,
            "certificates": self.etcd.authority.issue(name, role=self.role),
            "listen": "127.0.0.1:0",
            "state_dir": self.folder / name,
            "store_dir": self.folder / f"{name}-store",
            "cache_dir": self.folder / "data",
            "checkpoint_root": self.folder,
            "devices": "cpu",
            "lease_ttl_s": 2,
            "num_spares": 0,  # each would import torch for nothing
            "stop_timeout_s": 60,
        }
        options = [f"--{key.replace('_', '-')}={value}" for key, value in (known | flags).items() if value is not None]
        return [sys.executable, "-m", "headway.daemon.cli.main", "daemon", *options]

    def start(self, name: str, *, environment: dict[str, str] | None = None, **flags: object) -> None:
        """Start a daemon; its log goes to `<name>.log`."""
        with self.log_of(name).open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                self.command(name, **flags), stderr=log, stdout=log, env=self._environment() | (environment or {})
            )

    def refuse(self, name: str, **flags: object) -> tuple[int, str]:
        """Run a daemon that cannot start: (exit code, what it wrote)."""
        done = subprocess.run(
            self.command(name, **flags), env=self._environment(), capture_output=True, text=True, timeout=DEADLINE_S
        )
        return done.returncode, done.stderr

    async def started(self, *names: str, environment: dict[str, str] | None = None) -> None:
        """Start daemons, and return when they are registered."""
        for name in names:
            self.start(name, environment=environment)
        await self.until(lambda view: set(names) <= set(view.nodes) or None, f"nodes {names}")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a daemon a signal."""
        self.daemons[name].send_signal(number)

    async def ended(self, name: str) -> int:
        """A daemon's exit code, once it has ended."""
        return await asyncio.wait_for(asyncio.to_thread(self.daemons[name].wait), DEADLINE_S)

    def log_of(self, name: str) -> Path:
        """Return the file with the output of a daemon."""
        return self.folder / f"{name}.log"

    async def submit(
        self,
        name: str = "tiny",
        *,
        batches: int = 5,
        min_nodes: int = 1,
        seed: int = 3,
        **data: Any,
    ) -> None:
        """Put a job into etcd, as `headway submit` does."""
        spec = JobSpec(
            job=JobSection(name=name, seed=seed),
            model=MODEL,
            data=DataSpec(**({"source": str(self.data), "sha256": read_index(self.data).sha256} | data)),
            train=TrainSpec(
                batches=batches, microbatches=4, microbatch_size=2, sequence_length=16, attention_backend="flash"
            ),
            fault=FaultSpec(link_timeout_s=5.0),
            placement=PlacementSpec(min_nodes=min_nodes),
        )
        record = SpecRecord(spec=spec, submitted_at=time.time())
        await self.client.put(Keys.of(name, "spec"), encode(record))

    async def ask(self, state: Desired, name: str = "tiny", *, request: int) -> None:
        """Pause, resume or cancel."""
        await self.client.put(Keys.of(name, "desired"), encode(DesiredRecord(state=state, request=request)))

    async def view(self) -> ClusterView:
        """Return the content of etcd now."""
        view = ClusterView()
        for entry in (await self.client.get_prefix(PREFIX)).entries:
            view.apply(entry.key, entry.value, mod_revision=entry.mod_revision, create_revision=entry.create_revision)
        return view

    async def until(self, claim: Callable[[ClusterView], ValueT | None], what: str) -> ValueT:
        """The claim's value as soon as it has one; fails, with the daemons' logs, after a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while (value := claim(await self.view())) is None:
            has_died = any((process.poll() or 0) > 0 for process in self.daemons.values())
            if has_died or time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log_of(name).read_text()[-4000:]}" for name in self.daemons)
                pytest.fail(f"not within {DEADLINE_S:g} s: {what}\n{logs}")
            await asyncio.sleep(0.05)
        return value

    async def phase(self, *phases: Phase, name: str = "tiny") -> JobView:
        """The job, once it is in one of the phases."""

        def claim(view: ClusterView) -> JobView | None:
            job = view.jobs.get(name)
            return job if job is not None and job.phase.phase in phases else None

        return await self.until(claim, f"job {name} in {phases}")

    async def batch(self, number: int, *, name: str = "tiny") -> JobView:
        """The job, once this batch's loss is known."""

        def claim(view: ClusterView) -> JobView | None:
            job = view.jobs.get(name)
            return job if job is not None and job.progress is not None and job.progress.batch >= number else None

        return await self.until(claim, f"batch {number} of job {name}")

    def marked(self) -> list[int]:
        """Processes with our mark that live, the daemons among them."""
        return marked(self.mark)

    async def nothing_left(self) -> None:
        """Returns when no marked process lives."""
        deadline = time.monotonic() + 20
        while left := self.marked():
            assert time.monotonic() < deadline, f"left behind: {left}"
            await asyncio.sleep(0.05)

    def end(self) -> None:
        """Kill everything that is left."""
        for process in self.daemons.values():
            process.kill()
            process.wait()
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _environment(self) -> dict[str, str]:
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("HEADWAY_", "NOTIFY_", "WATCHDOG"))
        }
        return clean | {MARK: self.mark}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of token shards."""
    return write_tokens(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
async def playground(etcd: Any, client: EtcdClient, tmp_path: Path, shards: Path) -> AsyncIterator[Playground]:
    """An empty cluster; nothing of it is left after the test."""
    playground = Playground(etcd, client, tmp_path, shards)
    yield playground
    playground.end()


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    """Both services on the loopback, with certificates of one authority."""
    async with node_network(tmp_path) as network:
        yield network


@pytest.fixture
async def place(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> AsyncIterator[JoinPlace]:
    """A join port of the authority that etcd trusts."""
    async with join_place(etcd.authority, client, tmp_path) as found:
        yield found
