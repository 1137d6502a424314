"""A server like a worker's link server, at a port of its own and behind a node's shared port. A process for a bench.

It answers each message with its length. Its node also stands by at a relay, by the way through the port that a line of
standard input names. First it prints three ports: the server's own, the node's, the relay's.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from headway.daemon.net.port import Relay
from headway.daemon.net.port_process import PortProcess
from headway.stages.links.endpoint import TRANSPORT_OPTIONS
from headway.stages.sockets.shared_port import listen_at_first_free, listen_behind_shared_port
from headway.stages.sockets.tls_identity import TlsIdentity

NODE = "far"
INCARNATION = "0123456789abcdef"
METHOD = "/headway.bench.Path/Count"
HOST = "127.0.0.1"


async def serve(folder: Path) -> None:
    """Serve until the process is killed. folder: has the certificates, and gets the socket."""
    identity = TlsIdentity.read(folder / NODE)
    credentials = grpc.ssl_server_credentials([(identity.key, identity.certificate)], identity.ca, True)

    async def count(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield len(message).to_bytes(8, "little")

    server = grpc.aio.server(options=TRANSPORT_OPTIONS)
    _, service, method = METHOD.split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(count)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    own = listen_at_first_free(server, lambda: credentials, HOST, (0,))
    listen_behind_shared_port(server, credentials, folder, INCARNATION)
    await server.start()
    front = PortProcess(HOST, 0, daemon_port=own, folder=folder)
    relay = PortProcess(HOST, 0, daemon_port=own, folder=folder / "relay")
    print(own, front.port, relay.port, flush=True)
    with relay.standing_by(NODE) as token:
        await asyncio.gather(front.run(), relay.run(), _stand_by(front, token))


async def _stand_by(front: PortProcess, token: str) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        front.stand_by("relay", Relay(HOST, int(line), token))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
