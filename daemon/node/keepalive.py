"""How a client of a daemon notices on a silent stream that the machine is gone: both sides must agree on it. Pure.

gRPC's client pings a silent connection. Its server takes pings for an attack unless it is told otherwise: by default it
allows one in five minutes, and ends the connection with `too_many_pings`.
"""

from typing import Final

KEEPALIVE_S: Final = 10.0
"""Between two pings of a client on a silent connection."""
ANSWER_S: Final = 5.0
"""For the answer to a ping. Without it the connection is over."""

Options = tuple[tuple[str, int], ...]


def client_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Of a channel. It pings as long as a call is in flight, however little is said."""
    return (
        ("grpc.keepalive_time_ms", int(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(ANSWER_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_keepalive(interval_s: float = KEEPALIVE_S) -> Options:
    """Of a server whose clients ping so often: twice that is allowed, and what is more is still refused."""
    return (("grpc.http2.min_ping_interval_without_data_ms", int(interval_s * 500)),)
