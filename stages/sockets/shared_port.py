"""Dials a server at its own port, or behind a port that all servers of a node share; never through a web proxy. Finds
a port at which a server can listen.

The address behind a shared port is `host:port/name`. Whoever dials it asks the port for the name by HTTP's CONNECT,
which gRPC speaks before TLS (gRFC A1, https://github.com/grpc/proposal). TLS is between the two ends: the port passes
bytes on and reads none of them.

A node that can only dial out stands by at several ports of others: `host:port,host:port/name`, the best one first. Who
does not come through at one of them dials the next.
"""

import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from headway.stages.errors import NotListeningError, PortsTakenError
from headway.stages.sockets.local_socket import NAME_LENGTH, TLS_SUFFIX, socket_path
from headway.stages.sockets.tls_identity import expecting

MOST_PORTS: Final = 8
"""Maximum number of ports at which one node is looked for: any node may write any address as its own, and whoever dials
one that is silent waits at each port.
"""
LINKS: Final = "headway.data.Link"
REACH_METHOD: Final = "Reach"
"""Of a worker's links: answers whether it can be reached, by the port, TLS and the hello, without any link."""
_inner: dict[str, str] = {}
"""Where this machine finds a port of its own, by the port that others dial."""

_NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""gRPC would obey http_proxy, https_proxy and grpc_proxy, which are for the web: nodes are not behind that proxy."""

Options = tuple[tuple[str, Any], ...]


def shared_address(port: str, incarnation: str) -> str:
    """Return the address of a process behind a shared port.

    port: `host:port`, or the address of the process's node behind the port of another one, `host:port/node~`.
    """
    return f"{port}{'' if '/' in port else '/'}{incarnation[:NAME_LENGTH]}"


def listening_ports(address: str) -> tuple[str, ...]:
    """Return each `host:port` that others dial, the best one first, as far as anybody dials."""
    return tuple(address.partition("/")[0].split(",", MOST_PORTS)[:MOST_PORTS])


def listening_port(address: str, attempt: int = 0) -> str:
    """Return the `host:port` that others dial. attempt: number of dials in a row that led nowhere."""
    ports = listening_ports(address)
    return ports[attempt % len(ports)]


def dial_within(outer: str, inner: str) -> None:
    """Let this process dial a port of its own machine at `inner`. Others dial it at `outer`, which a router maps: many
    routers send nothing back to where it came from.
    """
    _inner[outer] = inner


def dialled_port(address: str, attempt: int = 0) -> str:
    """Return the `host:port` to which this process makes a connection. attempt: as in `listening_port`."""
    port = listening_port(address, attempt)
    return _inner.get(port, port)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials, *, node: str, options: Options = (), attempt: int = 0
) -> grpc.aio.Channel:
    """Return a channel to a server that has to present the certificate of a node; an empty one: of the dialled host.

    attempt: as in `listening_port`.
    """
    target, way = _way(address, attempt)
    return channel_to(target, credentials, options=(*options, *expecting(node), *way))


def channel_to(target: str, credentials: grpc.ChannelCredentials | None, *, options: Options = ()) -> grpc.aio.Channel:
    """Return a channel that ignores the environment's proxies. credentials None: neither side shows a certificate."""
    options = (*options, _NO_PROXY)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _way(address: str, attempt: int = 0) -> tuple[str, Options]:
    """Return what gRPC dials, and the options by which it comes there."""
    port, name = dialled_port(address, attempt), address.partition("/")[2]
    return port, ((("grpc.http_connect_server", f"{name}:443"),) if name else ())


def listen_at_first_free(
    server: grpc.aio.Server, credentials: Callable[[], grpc.ServerCredentials], host: str, ports: Sequence[int]
) -> int:
    """Listen at the first free port, and return it. host: an IPv6 address has brackets. credentials: makes those of one
    port; gRPC takes them for no second one.

    Raises PortsTakenError when others listen at all of them, NotListeningError when this machine cannot listen there.
    """
    unexplained: NotListeningError | None = None
    for port in ports:
        try:
            return server.add_secure_port(f"{host}:{port}", credentials())
        except RuntimeError as error:
            problem = _problem(host.strip("[]"), port)
            if problem is None:  # the process that had the port may have released it
                unexplained = NotListeningError(host, port, str(error))
            elif problem.errno != errno.EADDRINUSE:
                raise NotListeningError(host, port, problem.strerror or str(problem)) from error
    raise unexplained or PortsTakenError(host, tuple(ports))


def listen_behind_shared_port(
    server: grpc.aio.Server, credentials: grpc.ServerCredentials, folder: Path, incarnation: str
) -> None:
    """Listen at a unix socket in a node's private folder, where the node's shared port finds the server by its name.

    Raises NotListeningError.
    """
    path = socket_path(folder, incarnation, TLS_SUFFIX)
    if path is None:
        raise NotListeningError(str(folder), 0, "the path is too long for a unix socket")
    try:
        server.add_secure_port(f"unix:{path}", credentials)
    except RuntimeError as error:
        raise NotListeningError(str(path), 0, str(error)) from error


def _problem(host: str, port: int) -> OSError | None:
    """Return what keeps a plain socket from a port; None: nothing does. gRPC gives no reason for a failure."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None
