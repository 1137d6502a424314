"""Strangers at the ports of a cluster on this machine, until the input ends; what they reached as one line of JSON.

Idle connections say nothing and come again when they are closed. Handshakes are of TLS, complete and without a
certificate: each counts when the client's side is done, and stays until the server has refused it. Slow streams have a
certificate: each asks for a probe, takes the first piece and no more, and comes again when it is refused. Only loopback
addresses are taken for targets.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import grpc.aio

from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.tls_identity import TlsIdentity, expecting

AGAIN_S = 1.0
SLOW_AGAIN_S = 5.0
HANDSHAKE_LIMIT_S = 10.0
RECEIVED_AT_ONCE = 1 << 16
STREAMS_PER_CHANNEL = 50
PROBE_BYTES = 16 << 20

Target = tuple[str, int]


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[socket.socket]:
    """A TCP connection without asyncio's streams, which cost more than all that is done with it."""
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, target)
        yield one


def _is_done(client: ssl.SSLObject) -> bool:
    """Return whether a client's handshake is complete. Raises ssl.SSLError."""
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


class Strangers:
    """The connections and counts of all strangers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_idle = 0
        self.most_idle = 0

    async def idle(self, target: Target) -> None:
        """One connection that says nothing, again and again."""
        while True:
            with contextlib.suppress(OSError):
                async with connected(target) as one:
                    self.counts["connections"] += 1
                    self.num_idle += 1
                    self.most_idle = max(self.most_idle, self.num_idle)
                    try:
                        await asyncio.get_running_loop().sock_recv(one, 1)
                    finally:
                        self.num_idle -= 1
            await asyncio.sleep(AGAIN_S)

    async def handshake(self, target: Target, context: ssl.SSLContext, name: str) -> None:
        """One TLS handshake without a certificate."""
        loop, incoming, outgoing = asyncio.get_running_loop(), ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname=name)
        self.counts["handshakes begun"] += 1
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_LIMIT_S), connected(target) as one:
                while not _is_done(client):
                    await loop.sock_sendall(one, outgoing.read())
                    if not (answer := await loop.sock_recv(one, RECEIVED_AT_ONCE)):
                        return
                    incoming.write(answer)
                await loop.sock_sendall(one, outgoing.read())
                self.counts["handshakes"] += 1
                await loop.sock_recv(one, RECEIVED_AT_ONCE)

    async def slow(self, channel: grpc.aio.Channel) -> None:
        """One probe that is not read, again and again."""
        stub = control_pb2_grpc.NodeStub(channel)
        while True:
            call = stub.Probe(control_pb2.ProbeRequest(num_bytes=PROBE_BYTES))
            try:
                await call.read()
                self.counts["slow streams"] += 1
                await call.code()
            except grpc.aio.AioRpcError as error:
                self.counts[f"refused: {error.code().name}"] += 1
            await asyncio.sleep(SLOW_AGAIN_S)


async def each_in_turn(step: Callable[[Target], Awaitable[None]], targets: list[Target], per_s: float) -> None:
    """Begin a step so many times a second, at one target after the other."""
    loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    due = loop.time()
    for target in itertools.cycle(targets):
        due = max(due + 1 / per_s, loop.time() - 1)
        await asyncio.sleep(max(0.0, due - loop.time()))
        task = asyncio.ensure_future(step(target))
        running.add(task)
        task.add_done_callback(running.discard)


async def attack(options: argparse.Namespace, targets: list[Target], probed: list[Target]) -> Strangers:
    """Run until the input ends."""
    strangers = Strangers()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    identity = TlsIdentity.read(options.certificates)
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    tasks = [asyncio.create_task(strangers.idle(targets[n % len(targets)])) for n in range(options.idle)]
    own_pool = ("grpc.use_local_subchannel_pool", 1)
    for number in range(0, options.slow, STREAMS_PER_CHANNEL):
        host, port = probed[number // STREAMS_PER_CHANNEL % len(probed)]
        node = options.nodes[number // STREAMS_PER_CHANNEL % len(probed)]
        channel = grpc.aio.secure_channel(f"{host}:{port}", credentials, options=(*expecting(node), own_pool))
        tasks += [asyncio.create_task(strangers.slow(channel)) for _ in range(STREAMS_PER_CHANNEL)]
    if options.handshakes:
        step = partial(strangers.handshake, context=context, name=options.nodes[0])
        tasks.append(asyncio.create_task(each_in_turn(step, targets, options.handshakes / 60)))
    print("ready", flush=True)
    began = time.monotonic()
    await asyncio.to_thread(sys.stdin.read)
    strangers.counts["ms of handshakes"] = round(1000 * (time.monotonic() - began)) if options.handshakes else 0
    for task in tasks:
        task.cancel()
    return strangers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", required=True, help="HOST:PORT of daemons and workers")
    parser.add_argument("--daemons", nargs="+", required=True, help="HOST:PORT of those that answer probes")
    parser.add_argument("--nodes", nargs="+", required=True, help="their names, in the same order")
    parser.add_argument("--certificates", type=Path, required=True)
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--handshakes", type=float, default=10_000, help="a minute")
    options = parser.parse_args()

    def address(text: str) -> Target:
        host, _, port = text.rpartition(":")
        if not ip_address(host).is_loopback:
            parser.error(f"{text} is not a loopback address")
        return host, int(port)

    raise_open_file_limit()
    targets, daemons = [*map(address, options.targets)], [*map(address, options.daemons)]
    strangers = asyncio.run(attack(options, targets, daemons))
    told = {**strangers.counts, "most idle at once": strangers.most_idle, "cpu ms": round(1000 * time.process_time())}
    print(json.dumps(told), flush=True)
    os._exit(0)  # thousands of streams take their time to end in order


if __name__ == "__main__":
    main()
