"""Reads and writes host:port, and ranges of ports. An IPv6 host needs brackets before a colon, no other host
has them.
"""

from dataclasses import dataclass

from headway.daemon.errors import ConfigError

MAX_PORT = 65535
MAX_PORT_DIGITS = len(str(MAX_PORT))


@dataclass(frozen=True, slots=True, order=True)
class NodeEndpoint:
    """The address of a node's daemon, and the name with which it must answer."""

    name: str
    """The node's name in its certificate; empty: unknown, so the certificate must name the dialled host."""
    address: str
    """The address as host:port."""

    def __str__(self) -> str:
        return f"node {self.name} at {self.address}" if self.name else f"node at {self.address}"


def split_address(text: str, key: str) -> tuple[str, int]:
    """Return the host without brackets, and the port. Raises ConfigError, naming the setting, for any other text.

    A host with colons must have brackets, and no other host may have them.

    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and len(port) <= MAX_PORT_DIGITS and int(port) <= MAX_PORT
    if not colon or not is_port or (":" in host) is not is_bracketed or set(host) & set("[]"):
        raise ConfigError(f"{text!r} is not host:port; brackets stand around an IPv6 address", key)
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return host:port, as gRPC takes it."""
    return f"{bracketed(host)}:{port}"


def read_ports(text: str, key: str) -> range:
    """Return the ports that `7100-7107` or `7100` names. Raises ConfigError, naming the setting's key."""
    first, dash, last = text.partition("-")
    numbers = [first, last] if dash else [first, first]
    if not all(number.isascii() and number.isdigit() and len(number) <= MAX_PORT_DIGITS for number in numbers):
        raise ConfigError(f"{text!r} is not a range of ports such as 7100-7107", key)
    low, high = map(int, numbers)
    if not 1 <= low <= high <= MAX_PORT:
        raise ConfigError(f"{text!r}: ports rise from 1 to {MAX_PORT}", key)
    return range(low, high + 1)


def bracketed(host: str) -> str:
    """Return the host as it is written in front of a colon."""
    return f"[{host}]" if ":" in host else host
