"""Strangers at the ports of a cluster on this machine, until the input ends; what they reached as one line of JSON.

Idle connections say nothing and come again when they are closed. Handshakes are of TLS and without a certificate. Slow
streams have one: each asks for a probe, takes the first piece and no more, and comes again when it is refused. Only
loopback addresses are taken for targets.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path

import grpc.aio

from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.open_files import raise_open_file_limit
from headway.stages.tls_identity import TlsIdentity, expecting

AGAIN_S = 1.0
SLOW_AGAIN_S = 5.0
HANDSHAKE_LIMIT_S = 10.0
STREAMS_PER_CHANNEL = 50
PROBE_BYTES = 16 << 20

Target = tuple[str, int]


class Strangers:
    """What all of them hold and count."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_idle = 0
        self.most_idle = 0

    async def idle(self, target: Target) -> None:
        """One connection that says nothing, again and again."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*target)
                self.counts["connections"] += 1
                self.num_idle += 1
                self.most_idle = max(self.most_idle, self.num_idle)
                try:
                    await reader.read(1)
                finally:
                    self.num_idle -= 1
                    writer.close()
            await asyncio.sleep(AGAIN_S)

    async def handshake(self, target: Target, context: ssl.SSLContext) -> None:
        """One TLS handshake without a certificate."""
        self.counts["handshakes"] += 1
        with contextlib.suppress(OSError, TimeoutError):
            opening = asyncio.open_connection(*target, ssl=context, server_hostname="headway")
            _, writer = await asyncio.wait_for(opening, HANDSHAKE_LIMIT_S)
            writer.close()

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
    """Until the input ends."""
    strangers = Strangers()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
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
        shake = each_in_turn(lambda target: strangers.handshake(target, context), targets, options.handshakes / 60)
        tasks.append(asyncio.create_task(shake))
    await asyncio.to_thread(sys.stdin.read)
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
    print(json.dumps({**strangers.counts, "most idle at once": strangers.most_idle}), flush=True)
    os._exit(0)  # thousands of streams take their time to end in order


if __name__ == "__main__":
    main()
