"""Recovery over a slow line: what it costs to bring many layers through the daemon's own transfer code.

given_up: fetches that were given up and begun again.
carried_share: bytes that the holders sent over bytes that were needed; the bar is 1.01.
time_share: seconds over what the line needs for those bytes; the bar is 1.15.

Three cases, each with every layer asked for at once, as an agent does when it recovers:
one holder behind a line, one reader; one holder behind a line, three readers; two holders behind a line each, two
readers of the same layers, which are to use both lines.

The line is wan_proxy's: bytes pass at its rate, and nothing else of it is emulated.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch
from lines.wan_line import Line
from lines.wan_proxy import ProxyWan
from rigs.measure import Figure, progress, report

from headway.daemon.agent.agent import REST_S
from headway.daemon.agent.files import StateKeeper
from headway.daemon.agent.steps import Fetch
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.records import NodeRecord, SpecRecord
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.rate_limit import OutgoingTransfers, TransferKind
from headway.daemon.node.service import NodeDesk, add_node_service
from headway.daemon.node.stream_limits import bind_node_service
from headway.daemon.worker.goal import JobGeneration
from headway.proto.control_pb2 import ReadRequest
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.state.state_file import StateHeader, write_state

JOB = "slow-line"
LAYER_BYTES = 4_200_000
MOST_CARRIED = 1.01
MOST_TIME = 1.15
FETCH_OF = JobGeneration(JOB, 2)


@dataclass
class Cluster:
    """Holders of one boundary, each behind a line of its own, and those who read it."""

    folder: Path
    authority: CertificateAuthority
    view: ClusterView
    steps: list[Fetch] = field(default_factory=list)
    sent: list[OutgoingTransfers] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one reader needs."""
        return sum(step.expected.size_bytes for step in self.steps)

    @property
    def carried_bytes(self) -> int:
        """Return the bytes that the holders have sent."""
        return sum(transfers.sent[TransferKind.RECOVERY].num_bytes for transfers in self.sent)

    def identity(self, name: str) -> TlsIdentity:
        """A certificate of the cluster's authority."""
        return TlsIdentity.read(self.authority.issue(name))


class CountingClient(NodeClient):
    """Counts how often a file is asked for."""

    num_asked = 0

    def read(self, endpoint: NodeEndpoint, request: ReadRequest) -> AsyncIterator[bytes]:
        """One more."""
        self.num_asked += 1
        return super().read(endpoint, request)


async def write_layers(store: StateStore, holders: tuple[str, ...], *, num_layers: int) -> list[Fetch]:
    """One boundary, the same bytes in every store; what brings it to a reader."""
    torch.manual_seed(1)
    steps = []
    for index in range(num_layers):
        key = StateKey(JOB, 1, 0, f"block.{index}")
        header = StateHeader(job=JOB, layer=key.layer, boundary=0, timeline=1, dtype="float32")
        path, weights = await store.place_for(key), {"current/weight": torch.randn(LAYER_BYTES // 4)}
        written = await asyncio.to_thread(write_state, path, weights, header)
        await store.adopt(key, StoredFile(path=path, size_bytes=written.size_bytes, checksum=written.checksum))
        expected = written.digest
        steps.append(Fetch(0, FETCH_OF, key, holders, "", expected))
    return steps


@asynccontextmanager
async def holding(cluster: Cluster, name: str, line: Line) -> AsyncIterator[tuple[StateStore, NodeRecord]]:
    """A node's service behind a line, with an empty store."""
    store = StateStore(cluster.folder / name)
    store.open()
    transfers = OutgoingTransfers()
    client = NodeClient(cluster.identity(name))
    server, port = bind_node_service(cluster.identity(name), "127.0.0.1", 0)
    desk = NodeDesk(
        node=name,
        incarnation=name,
        view=cluster.view,
        store=store,
        library=DataLibrary(cluster.folder / f"{name}-data", client, list),
        client=client,
        logs_dir=cluster.folder / "logs",
        checkpoint_root=None,
        outgoing=transfers,
    )
    add_node_service(server, desk)
    await server.start()
    cluster.sent.append(transfers)
    try:
        with ProxyWan(port) as wan:
            wan.set(line)
            yield store, record_of(name, f"127.0.0.1:{wan.port}")
    finally:
        await server.stop(None)
        await client.close()


def record_of(name: str, address: str) -> NodeRecord:
    """A node without devices."""
    return NodeRecord(
        name=name,
        incarnation=name,
        address=address,
        host="127.0.0.1",
        site="",
        devices=(),
        memory_bytes=0,
        arithmetic_class="",
    )


async def read_all(cluster: Cluster, name: str) -> int:
    """Every layer at once, as an agent asks; returns how many fetches were given up."""
    store = StateStore(cluster.folder / name)
    store.open()
    client = CountingClient(cluster.identity(name))
    keeper = StateKeeper(
        node=name,
        view=cluster.view,
        store=store,
        client=client,
        checkpoint_root=None,
        outgoing=OutgoingTransfers(),
    )

    async def fetch(step: Fetch) -> None:
        while True:
            try:
                await keeper.fetch(step)
            except RecoveryError as error:
                progress(f"{name}: {error}")
                await asyncio.sleep(REST_S)
            else:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for step in cluster.steps:
                group.create_task(fetch(step))
    finally:
        await client.close()
        await store.close()
    return client.num_asked - len(cluster.steps)


async def measure(line: Line, *, num_layers: int, num_holders: int, num_readers: int) -> dict[str, float]:
    """One case."""
    job = JobView(name=JOB, submission=SpecRecord(spec=JobSpec(job=JobSection(name=JOB))))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        cluster = Cluster(folder, CertificateAuthority.create(folder / "authority"), ClusterView(jobs={JOB: job}))
        names = tuple(f"holder-{index}" for index in range(num_holders))
        for name in names:
            store, cluster.view.nodes[name] = await stack.enter_async_context(holding(cluster, name, line))
            cluster.steps = await write_layers(store, names, num_layers=num_layers)
        began = time.monotonic()
        given_up = await asyncio.gather(*(read_all(cluster, f"reader-{index}") for index in range(num_readers)))
        seconds = time.monotonic() - began
    needed = cluster.num_bytes * num_readers
    return {
        "given_up": float(sum(given_up)),
        "carried_share": cluster.carried_bytes / needed,
        "time_share": seconds / (needed / num_holders / line.bytes_per_s),
        "needed_mb": needed / 1e6,
        "carried_mb": cluster.carried_bytes / 1e6,
        "seconds": seconds,
    }


CASES = {
    "one holder, one reader": (1, 1),
    "one holder, three readers": (1, 3),
    "two holders, two readers": (2, 2),
}
"""(holders, readers)"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the layers, for a first look")
    parser.add_argument("--mbit", type=float, default=25.0, help="of each line")
    parser.add_argument("--layers", type=int, default=40)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    num_layers = options.layers // 4 if options.quick else options.layers
    line, is_missed = Line(mbit_s=options.mbit), False
    figures: dict[str, Figure] = {}
    extra: dict[str, object] = {}
    for name, (num_holders, num_readers) in CASES.items():
        found = asyncio.run(measure(line, num_layers=num_layers, num_holders=num_holders, num_readers=num_readers))
        is_missed |= found["given_up"] > 0 or found["carried_share"] > MOST_CARRIED or found["time_share"] > MOST_TIME
        progress(f"{name}: {found}")
        extra[name] = {what: round(value, 4) for what, value in found.items()}
        figures |= {f"{name}: {what}": Figure.of([found[what]]) for what in ("given_up", "carried_share", "time_share")}
    report(f"{num_layers} layers over lines of {options.mbit:g} Mbit/s", figures, extra=extra)
    return int(is_missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
