"""Parts that tests of relays share."""

import socket

HOST = "127.0.0.1"


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has now."""
    held = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
