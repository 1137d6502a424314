"""This machine's network interfaces, and which of them NCCL takes."""

import ctypes
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Final

NCCL_INTERFACES: Final = "NCCL_SOCKET_IFNAME"
"""Variable with the start of the names that NCCL may take; `=` before them: the whole names, `^`: all others."""
_PREFERRED: Final = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""What NCCL tries one after the other where nobody has said anything."""
_ADDRESSES: Final = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where the kernel's structure of a socket's address has the address."""
_MOST_BYTES: Final = 24


class _Entry(ctypes.Structure):
    """The first members of C's `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_addresses() -> list[tuple[str, str]]:
    """Return each address with its interface's name, in the order in which NCCL sees them. Raises OSError."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the interfaces cannot be listed")
    found = []
    entry: Any = first
    while entry:
        if (address := entry.contents.address) is not None:
            family = ctypes.c_ushort.from_address(address).value
            if family in _ADDRESSES:
                told = ctypes.string_at(address, _MOST_BYTES)[_ADDRESSES[socket.AddressFamily(family)]]
                found.append((entry.contents.name.decode(), socket.inet_ntop(family, told)))
        entry = entry.contents.next
    libc.freeifaddrs(first)
    return found


def interface_of(host: str, addresses: Iterable[tuple[str, str]]) -> str:
    """Return the interface that has an address; empty: none has, or it reaches this machine only."""
    name = next((name for name, address in addresses if address == host.strip("[]")), "")
    return "" if name == "lo" else name


def nccl_takes(addresses: Iterable[tuple[str, str]], environment: Mapping[str, str]) -> str:
    """Return the interface over which NCCL meets its peers; empty: it finds none."""
    names = list(dict.fromkeys(name for name, address in addresses if address != "::1"))
    told = environment.get(NCCL_INTERFACES)
    for rule in (told,) if told else _PREFERRED:
        if fitting := [name for name in names if _fits(name, rule)]:
            return fitting[0]
    return ""


def _fits(name: str, rule: str) -> bool:
    is_other = rule.startswith("^")
    rule = rule.removeprefix("^")
    is_whole = rule.startswith("=")
    parts = rule.removeprefix("=").split(",")
    return any(name == part if is_whole else name.startswith(part) for part in parts) is not is_other
