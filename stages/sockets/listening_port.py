"""Finds a port at which a server can listen. gRPC gives no reason for a failure: a plain socket finds it."""

import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from headway.stages.errors import NotListeningError, PortsTakenError
from headway.stages.sockets.local_socket import TLS_SUFFIX, socket_path


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
    """Return what keeps a plain socket from a port; None: nothing does."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None
