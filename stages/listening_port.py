"""Which of its ports a server listens at. gRPC says only that it could not: a plain socket finds out why."""

import errno
import socket
from collections.abc import Sequence

import grpc

from headway.stages.errors import NotListeningError, PortsTakenError


def listen_at_first_free(
    server: grpc.aio.Server, credentials: grpc.ServerCredentials, host: str, ports: Sequence[int]
) -> int:
    """The port that is free. host: an IPv6 address stands in brackets.

    Raises PortsTakenError when others listen at all of them, NotListeningError when this machine cannot listen there.
    """
    unexplained: NotListeningError | None = None
    for port in ports:
        try:
            return server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            problem = _problem(host.strip("[]"), port)
            if problem is None:  # who had the port may have let it go in between
                unexplained = NotListeningError(host, port, str(error))
            elif problem.errno != errno.EADDRINUSE:
                raise NotListeningError(host, port, problem.strerror or str(problem)) from error
    raise unexplained or PortsTakenError(host, tuple(ports))


def _problem(host: str, port: int) -> OSError | None:
    """What keeps a plain socket from a port; None: nothing does."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None
