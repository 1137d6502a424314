"""One of the two processes of `wire.py`: every way to the other one, opened when it is first asked for."""

import asyncio
import resource
import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headway.stages.ids import StageIndex
from headway.stages.links.endpoint import TRANSPORT_OPTIONS, LinkEndpoint
from headway.stages.links.frame_codec import CHUNK_BYTES
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Inbox, Link
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import LocalPlace
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from headway.stages.stage.allocator import keep_freed_memory
from rigs.wire_sides import GENERATION, LINKS, TIMEOUT, BareSide, GlooSide, LinkSide, Side, TcpSide, TensorSide

SMALL_BYTES = 1 << 10
NUM_ROUND_TRIPS = 200
HOST = "127.0.0.1"
UNLIMITED = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1}
BARE_OPTIONS = tuple({**dict(TRANSPORT_OPTIONS), **UNLIMITED}.items())


class Process:
    """One of the two; rank 0 dials."""

    def __init__(self, rank: int, certificates: Path) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as every worker does
        self._rank = rank
        self._identity = TlsIdentity.read(certificates)
        self._loop = LoopThread()
        self._loop.start()
        incarnation = "ab"[rank]
        about: dict[str, Any] = {"loop": self._loop, "identity": self._identity, "host": HOST, "protocol": 1}
        self._grpc = LinkEndpoint(**about, incarnation=incarnation)
        self._folder = certificates
        # Another process to the hello, because an endpoint dials all of its node over unix sockets.
        self._local = LinkEndpoint(**about, incarnation=f"{incarnation}-local", local=LocalPlace("node", self._folder))
        self._grpc.start()
        self._local.start()
        self._streams: asyncio.Queue[Any] = asyncio.Queue()
        self._listener = socket.create_server((HOST, 0))
        bare_port = self._loop.run(self._serve_bare(), timeout=TIMEOUT, what="a bare server")
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.ports: list[int] = [self._grpc.port, bare_port, self._listener.getsockname()[1], self._store.port]
        self._peer_ports: list[int] = []
        self._channel: grpc.aio.Channel | None = None
        self._sides: dict[tuple[str, int], Side] = {}

    def connect(self, peer_ports: list[int]) -> None:
        """Open the links once both listen. gloo's group is made here."""
        self._peer_ports = peer_ports
        store = self._store if self._rank else TCPStore(HOST, peer_ports[3], is_master=False)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=2, timeout=TIMEOUT)

    def run(self, side: str, num_bytes: int, num_frames: int, *, is_both_ways: bool = False) -> tuple[float, float]:
        """Seconds and processor seconds of this process. The first pass of a side and size makes its connection.

        is_both_ways: frames go both ways at once, which only links can.
        """
        if (side, num_bytes) not in self._sides:
            self._sides[side, num_bytes] = self._open(side, num_bytes)
        way = self._sides[side, num_bytes]
        began, cpu_began = time.perf_counter(), _cpu_seconds()
        if is_both_ways:
            assert isinstance(way, LinkSide)
            way.exchange(num_frames)
        else:
            (way.take if self._rank else way.send)(num_frames)
        return time.perf_counter() - began, _cpu_seconds() - cpu_began

    def round_trips(self, side: str) -> float:
        """Seconds, the median."""
        return statistics.median(self.run(side, SMALL_BYTES, 1)[0] for _ in range(NUM_ROUND_TRIPS))

    def _open(self, side: str, num_bytes: int) -> Side:
        if side == "tcp":
            connection = (
                self._listener.accept()[0] if self._rank else socket.create_connection((HOST, self._peer_ports[2]))
            )
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return TcpSide(connection, num_bytes)
        if side in ("gloo", "gloo_new"):
            return GlooSide(num_bytes, is_new=side == "gloo_new")
        if side in LINKS:

            def open_link(inbox: Inbox, contract: FrameContract) -> Link:
                terms = self._terms(f"{side}-{num_bytes}", inbox, contract)
                if side == "grpc_local":
                    terms = replace(terms, peer_incarnation=f"{terms.peer_incarnation}-local")
                terms = replace(terms, is_plain=side == "plain")
                endpoint = self._local if side == "grpc_local" else self._grpc
                return endpoint.accept(terms) if self._rank else endpoint.dial(terms)

            return LinkSide(self._rank, open_link, num_bytes)
        is_local = side.endswith("_unix")
        stream = self._loop.run(self._bare_stream(is_local=is_local), timeout=TIMEOUT, what="a bare stream")
        if side == "grpc_tensors":
            return TensorSide(self._loop, stream, num_bytes, CHUNK_BYTES)
        return BareSide(self._loop, stream, num_bytes, CHUNK_BYTES if "cut" in side else num_bytes)

    async def _serve_bare(self) -> int:
        async def serve(_: Any, context: Any) -> None:
            assert await context.read() == b"hello"
            self._streams.put_nowait(context)
            await asyncio.Event().wait()

        self._bare = grpc.aio.server(options=BARE_OPTIONS)
        handler: Any = grpc.stream_stream_rpc_method_handler(serve)
        self._bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Stream": handler}),))
        identity = self._identity
        credentials = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)], root_certificates=identity.ca, require_client_auth=True
        )
        port = self._bare.add_secure_port(f"{HOST}:0", credentials)
        self._bare.add_insecure_port(self._bare_socket(self._rank))
        await self._bare.start()
        return port

    def _bare_socket(self, rank: int) -> str:
        return f"unix:{self._folder}/bare-{rank}.sock"

    async def _bare_stream(self, *, is_local: bool) -> Any:
        if self._rank:
            return await self._streams.get()
        if is_local:
            return await self._hello(grpc.aio.insecure_channel(self._bare_socket(1 - self._rank), options=BARE_OPTIONS))
        identity = self._identity
        credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
        options = (*BARE_OPTIONS, *expecting("node"), ("grpc.use_local_subchannel_pool", 1))
        return await self._hello(grpc.aio.secure_channel(f"{HOST}:{self._peer_ports[1]}", credentials, options=options))

    async def _hello(self, channel: grpc.aio.Channel) -> Any:
        call: Any = channel.stream_stream("/bare/Stream")()
        await call.write(b"hello")
        call.channel = channel  # lives as long
        return call

    def _terms(self, job: str, inbox: Inbox, contract: FrameContract) -> LinkTerms:
        peer = 1 - self._rank
        return LinkTerms(
            job=job,
            generation=GENERATION,
            stage=StageIndex(self._rank),
            worker=self._rank,
            peer_stage=StageIndex(peer),
            peer_worker=peer,
            peer_incarnation="ab"[peer],
            peer_node="node",
            peer_name=f"stage {peer}",
            peer_address=f"{HOST}:{self._peer_ports[0]}",
            inbox=inbox,
            contract=contract,
            first_contact=TIMEOUT,
            silence=TIMEOUT,
        )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
