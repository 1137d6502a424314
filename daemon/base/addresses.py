"""Reads addresses and checks names: they become keys, folders and lines on terminals. Pure.

An IPv6 host needs brackets before a colon, no other host has them.
"""

import re
from dataclasses import dataclass
from typing import Final

from headway.daemon.base.errors import ConfigError

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


_JOB: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(?<!\.)")
_MAX_PART: Final = 128
"""Maximum number of characters of an id that becomes a folder's name."""

LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""Every certificate bears these names, so none of them tells one from another."""
JOB_NAME_RULE: Final = "1 to 63 lower-case letters, digits and inner hyphens"
NODE_NAME_RULE: Final = "1 to 253 letters, digits, hyphens, underscores and inner dots, and a letter or digit first"


def is_job_name(name: str) -> bool:
    """Return whether a job may have this name; see JOB_NAME_RULE."""
    return _JOB.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """Return whether a node may have this name; see NODE_NAME_RULE. Every host name is valid.

    None ends with a dot: TLS ignores that one, so `a.` would pass for `a`.
    """
    return _NODE.fullmatch(name) is not None


def is_path_part(text: str) -> bool:
    """Return whether an id can be the name of exactly one file or folder."""
    return len(text) <= _MAX_PART and text.isprintable() and "/" not in text and text not in (".", "..")
