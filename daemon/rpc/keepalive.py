"""Sets how a client of a daemon notices on a silent stream that the machine is gone: both sides must agree. Pure.

gRPC's client pings a silent connection. By default its server takes pings for an attack: it allows one in five minutes,
and otherwise ends the connection with `too_many_pings`.
"""

from typing import Final

KEEPALIVE_S: Final = 10.0
"""Interval of a client's pings on a silent connection."""
ANSWER_S: Final = 5.0
"""Time for the answer to a ping. Without it the connection is over."""

Options = tuple[tuple[str, int], ...]


def client_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Return the options of a channel. It pings while a call is in flight, even on a silent stream."""
    return (
        ("grpc.keepalive_time_ms", int(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(ANSWER_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Return the options of a server with such clients: twice their rate is allowed, and a higher one still refused."""
    return (("grpc.http2.min_ping_interval_without_data_ms", int(interval_s * 500)),)
