"""Garbage at a living cluster: records in etcd, calls of every RPC, hellos at workers, bytes at every port.

    python -m tests.fuzz.live --minutes 5

Three nodes train a job meanwhile. No daemon may end, memory stays bounded, and the job ends with the reference's bits.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from headway.daemon.base.errors import StoreError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import TERMINAL_PHASES, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import PlacementSpec, QueueSpec
from headway.daemon.local.cluster import LocalCluster
from headway.proto import control_pb2
from headway.stages.links.endpoint import METHOD
from headway.stages.sockets.shared_port import LINKS
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.fuzz.run import TOKENS, mutated
from tests.fuzz.targets import TARGETS
from tests.integration.exactness.training import Oracle, assert_same_bits, finished, small_job

JOB: Final = "fuzzed"
MAX_GROWTH_BYTES: Final = 600 << 20
CALL_TIMEOUT_S: Final = 5.0
END_S: Final = 600.0
"""Time for the job to end once nothing is thrown any more."""
GARBAGE_KEYS: Final = ("nodes/", "jobs/", "probes/", "failures/", "reach/", "shares/", "revoked/", "issued/",
                       "invitations/", "nobody/knows/")  # fmt: skip
LEAVES: Final = ("spec", "phase", "plan", "next", "stop", "checkpoint", "desired", "progress", "workers/1/0",
                 "state/1/2/node-1", "state/x/y/z", "events/x", "profile/a", "goodput/9/9", "nonsense")  # fmt: skip

BEYOND_ALL: Final = (1e-320, 1e308, -1.0, 0.0)
"""Numbers that JSON has and no clock, weight or count has."""


@dataclass(slots=True)
class Attack:
    """The inputs, and how often each was sent."""

    session: ClusterSession
    identity: TlsIdentity
    draw: random.Random
    counts: dict[str, int] = field(default_factory=dict)

    async def record(self, _: ClusterView) -> None:
        """A key that nobody should have written, now and then deleted again."""
        tail = self.draw.choice([f"{self.draw.choice(LEAVES)}", "x", "a/b/c", "\x1b[31m", "..", ""])
        prefix = self.draw.choice(GARBAGE_KEYS)
        name = f"garbage-{self.draw.randint(0, 5)}" + ("/" if prefix == "jobs/" else "")
        key = f"{PREFIX}{prefix}{name}{tail}"
        seeds = TARGETS["records"].seeds()
        value = mutated(self.draw.choice(seeds).partition(b"\0")[2], self.draw)
        client = self.session.client
        await asyncio.wait_for(client.put(key, value), CALL_TIMEOUT_S)
        if self.draw.random() < 0.5:
            await asyncio.wait_for(client.delete(key), CALL_TIMEOUT_S)

    async def absurd(self, _: ClusterView) -> None:
        """A record that every daemon reads, well-formed, with numbers and names that make no sense."""
        user = self.draw.choice(["fuzz", "\x1b[2J", "u" * 10_000, "ü"])
        numbers = {name: self.draw.choice(BEYOND_ALL) for name in ("weight", "slice_s", "half_life_s", "used")}
        job = replace(small_job("absurd"), queue=QueueSpec(priority=self.draw.choice([-(10**12), 10**12])))
        shares = SharesRecord(
            weights={user: numbers["weight"]}, slice_s=numbers["slice_s"], half_life_s=numbers["half_life_s"]
        )
        key, record = self.draw.choice(
            [
                (Keys.SHARES, shares),
                (Keys.USAGE, UsageRecord(seconds={user: numbers["used"]})),
                (Keys.of("absurd", "spec"), SpecRecord(spec=job, submitted_by=user, parent=user)),
            ]
        )
        await asyncio.wait_for(self.session.client.put(key, encode(record)), CALL_TIMEOUT_S)
        if self.draw.random() < 0.5:
            await asyncio.wait_for(self.session.client.delete(key), CALL_TIMEOUT_S)

    async def rpc(self, view: ClusterView) -> None:
        """Any RPC of a daemon with bytes that are no request."""
        service = control_pb2.DESCRIPTOR.services_by_name["Node"]
        method = self.draw.choice(list(service.methods))
        node = self.draw.choice(list(view.nodes.values()))
        payload = self.draw.randbytes(self.draw.choice([0, 5, 300])) + self.draw.choice(TOKENS)[:100]
        async with self._channel(node.address, node.name) as channel:
            ask: Any = channel.unary_stream(f"/{service.full_name}/{method.name}")
            call = ask(payload, timeout=CALL_TIMEOUT_S)
            num_replies = 0
            async for _ in call:
                num_replies += 1
                if num_replies > 5:
                    call.cancel()

    async def hello(self, view: ClusterView) -> None:
        """A hello at a worker, almost right."""
        job = view.jobs.get(JOB)
        workers = list(job.workers_of(job.plan).values()) if job is not None and job.plan is not None else []
        if not workers:
            return
        payload = mutated(self.draw.choice(TARGETS["hello"].seeds()), self.draw)
        worker = self.draw.choice(workers)
        async with self._channel(worker.address, worker.node) as channel:
            ask: Any = channel.stream_stream(f"/{LINKS}/{METHOD}")
            call = ask(_once(payload), timeout=CALL_TIMEOUT_S)
            async for _ in call:
                call.cancel()

    async def bytes_at_a_port(self, view: ClusterView) -> None:
        """Bytes that are no TLS at the port of a daemon or a worker."""
        job = view.jobs.get(JOB)
        addresses = [node.address for node in view.nodes.values()]
        if job is not None and job.plan is not None:
            addresses += [worker.address for worker in job.workers_of(job.plan).values()]
        host, _, port = self.draw.choice(addresses).rpartition(":")
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CALL_TIMEOUT_S)
        writer.write(self.draw.randbytes(self.draw.choice([1, 100, 20_000])))
        await asyncio.sleep(self.draw.random() / 10)
        writer.close()

    def _channel(self, address: str, node: str) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.identity.ca,
            private_key=self.identity.key,
            certificate_chain=self.identity.certificate,
        )
        return grpc.aio.secure_channel(address, credentials, options=expecting(node))

    async def go_on(self, throw: Callable[[ClusterView], Awaitable[None]], view: Callable[[], ClusterView]) -> None:
        """Throw until cancelled; every answer is right, also a refusal."""
        name = throw.__name__
        while True:
            try:
                if view().nodes:
                    await throw(view())
                self.counts[name] = self.counts.get(name, 0) + 1
            except (grpc.aio.AioRpcError, StoreError, OSError, TimeoutError, ValueError) as error:
                kind = f"{name}: {type(error).__name__}"
                self.counts[kind] = self.counts.get(kind, 0) + 1
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            await asyncio.sleep(0.01)


async def _once(payload: bytes) -> AsyncIterator[bytes]:
    yield payload


def resident_bytes(pids: Sequence[int]) -> int:
    """The memory of processes that live."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total


async def attack(folder: Path, *, minutes: float, seed: int, batches: int) -> dict[str, int]:
    """Returns what was thrown, by kind. Raises AssertionError for anything that broke."""
    spec = replace(small_job(JOB, batches=batches), placement=PlacementSpec(min_nodes=1, max_nodes=3))
    cluster = LocalCluster(folder / "state", num_nodes=3)
    async with cluster, ClusterSession(cluster.address) as session:
        identity = cluster.address.identity()
        assert identity is not None
        daemons = {node.name: node.pid for node in cluster.nodes}
        before = resident_bytes(list(daemons.values()))
        thrower = Attack(session, identity, random.Random(seed))
        views = [ClusterView()]
        following = asyncio.create_task(_follow(session, views))
        await submit(session, spec)
        throws = (thrower.record, thrower.absurd, thrower.rpc, thrower.hello, thrower.bytes_at_a_port)
        tasks = [asyncio.create_task(thrower.go_on(throw, lambda: views[-1])) for throw in throws]
        deadline, peak = time.monotonic() + 60.0 * minutes, before
        try:
            while time.monotonic() < deadline:
                await asyncio.sleep(1.0)
                peak = max(peak, resident_bytes(list(daemons.values())))
                assert {node.name: node.pid for node in cluster.nodes} == daemons, "a daemon ended"
                job = views[-1].jobs.get(JOB)
                if job is not None and job.phase.phase in TERMINAL_PHASES:
                    break
        finally:
            pending = {*tasks, following}
            while pending:  # again: a cancellation that meets an error of etcd is that error
                for task in pending:
                    task.cancel()
                _, pending = await asyncio.wait(pending, timeout=1.0)
        assert peak - before < MAX_GROWTH_BYTES, f"the daemons grew by {(peak - before) >> 20} MiB"
        # How far the job is by then depends on the machine, which is shared with what was thrown.
        result = await finished(session, JOB, folder / "out", timeout_s=END_S)
        assert {node.name: node.pid for node in cluster.nodes} == daemons, "a daemon ended"
    assert_same_bits(result, Oracle(folder / "oracle")(spec))
    return thrower.counts | {"daemons grew by MiB": (peak - before) >> 20}


async def _follow(session: ClusterSession, views: list[ClusterView]) -> None:
    while True:
        found = session.follow()
        try:
            async for view in found:
                views[-1] = view
        except StoreError:
            await asyncio.sleep(0.1)
        finally:
            await found.aclose()


def main(arguments: list[str]) -> int:
    """Attack, and print what was thrown."""
    parser = argparse.ArgumentParser(prog="live", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fuzz-live-") as scratch:
        counts = asyncio.run(attack(Path(scratch), minutes=options.minutes, seed=options.seed, batches=options.batches))
    for name, number in sorted(counts.items()):
        sys.stdout.write(f"{number:8d}  {name}\n")
    sys.stdout.write("no daemon ended; the job has the reference's bits\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
