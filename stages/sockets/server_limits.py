"""The limits of a gRPC server for its clients, before and after TLS. They follow the process's own file limit.

gRPC counts a connection from its first packet on and closes further ones at once. A connection that has not finished
its handshakes (TCP, TLS, HTTP/2) in time is closed as well, and so is one that makes no call for long.
"""

from typing import Final

from headway.stages.sockets.open_files import most_connections, open_file_limit

HANDSHAKE_TIMEOUT_S: Final = 10.0
IDLE_CONNECTION_S: Final = 300.0

Options = tuple[tuple[str, int], ...]


def server_limits(
    *,
    streams_per_connection: int,
    num_connections: int | None = None,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Options:
    """Return options of a server that listens at TCP. num_connections: as many as the process's open files allow if
    None.
    """
    if num_connections is None:
        num_connections = most_connections(open_file_limit())
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", num_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * handshake_timeout_s)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_CONNECTION_S)),
        ("grpc.max_concurrent_streams", streams_per_connection),
    )
