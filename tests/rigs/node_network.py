"""Two Node services in this process, over real mTLS channels, that see one cluster."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient, layer_request
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.records import NodeRecord, SpecRecord, StateFile, StateRecord
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node.service import NodeDesk, add_node_service
from headway.daemon.node.stream_limits import bind_node_service
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.state_file import StateHeader, write_state

KEY = StateKey("j", 1, 5, "head")


def state_file() -> tuple[bytes, FileDigest]:
    """A state file of some 2.5 MB: three chunks."""
    header = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        written = write_state(path, {"weight": torch.arange(640_000, dtype=torch.float32)}, header)
        return path.read_bytes(), written.digest


DATA, FILE = state_file()
HELD_BY_B = StateRecord(
    incarnation="b-1", generation=1, files={"head": StateFile(size_bytes=FILE.size_bytes, checksum=FILE.checksum)}
)


def desk_of(name: str, folder: Path, client: NodeClient, **changes: Any) -> NodeDesk:
    """What a node answers from, in a folder: of an empty cluster, with nobody else, no room and no data."""
    known: dict[str, Any] = {
        "node": name,
        "incarnation": f"{name}-1",
        "view": ClusterView(),
        "store": StateStore(folder / "store", quota_bytes=0),
        "library": DataLibrary(folder / "data", client, list),
        "client": client,
        "logs_dir": folder,
        "checkpoint_root": folder,
    }
    return NodeDesk(**known | changes)


@dataclass
class Node:
    """A Node service in this process."""

    name: str
    address: str
    store: StateStore
    library: DataLibrary
    folder: Path

    @property
    def endpoint(self) -> NodeEndpoint:
        """Return the address at which it is dialled."""
        return NodeEndpoint(self.name, self.address)

    async def hold(self, data: bytes = DATA) -> None:
        """Put KEY's file into its store."""
        path = self.store.path_of(KEY)
        path.write_bytes(data)
        await self.store.adopt(KEY, StoredFile(path=path, size_bytes=len(data), checksum=FILE.checksum))


@dataclass
class Network:
    """Two nodes, `a` and `b`, that see one cluster."""

    a: Node
    b: Node
    desks: dict[str, NodeDesk]
    view: ClusterView
    client: NodeClient
    identity: TlsIdentity

    @property
    def job(self) -> JobView:
        return self.view.jobs["j"]

    async def read(self, node: Node, *, offset: int = 0, forward: bool = False) -> bytes:
        """KEY's file, as a node gives it."""
        pieces = self.client.read(node.endpoint, layer_request(KEY, offset=offset, forward=forward))
        return b"".join([piece async for piece in pieces])


@asynccontextmanager
async def node_network(tmp_path: Path, names: str = "ab") -> AsyncIterator[Network]:
    """Their services on the loopback, with certificates of one authority. names: a letter a node."""
    authority = CertificateAuthority.create(tmp_path / "authority")
    identity = TlsIdentity.read(authority.issue("test"))
    client = NodeClient(identity)
    job = JobView(name="j", submission=SpecRecord(spec=JobSpec(job=JobSection(name="j"))))
    view = ClusterView(jobs={"j": job})
    nodes, servers, desks = [], [], {}
    for name in names:
        folder = tmp_path / name
        store = StateStore(folder / "store", quota_bytes=len(DATA) + 1000)
        store.open()
        server, port = bind_node_service(TlsIdentity.read(authority.issue(name)), "127.0.0.1", 0)

        def others(name: str = name) -> list[NodeEndpoint]:
            return [record.endpoint for record in view.nodes.values() if record.name != name]

        library = DataLibrary(folder / "data", client, others)
        more = {"view": view, "store": store, "library": library, "checkpoint_root": tmp_path}
        desks[name] = desk_of(name, folder, client, **more)
        add_node_service(server, desks[name])
        await server.start()
        servers.append(server)
        address = f"127.0.0.1:{port}"
        view.nodes[name] = NodeRecord(
            name=name,
            incarnation=f"{name}-1",
            address=address,
            host="127.0.0.1",
            site="",
            devices=(),
            memory_bytes=0,
            arithmetic_class="",
        )
        nodes.append(Node(name, address, store, library, folder))
    yield Network(nodes[0], nodes[1], desks, view, client, identity)
    await client.close()
    for server in servers:
        await server.stop(None)
