"""Follows a machine whose address changes under a running daemon.

Workers listen at one address, which the node's record names. When the machine has it no more, the address by which it
reaches etcd takes its place; whether others reach that is for them to prove. Where there is none, the node says so.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from headway.daemon.addresses import split_address
from headway.daemon.node.own_host import has_address, resolved

log = structlog.get_logger()

LOOK_EVERY_S: Final = 3.0
NUM_LOOKS: Final = 2
"""An address counts as gone after so many looks in a row: a lease of DHCP may be renewed between two."""


class AddressWatch:
    """`run` until cancelled."""

    def __init__(
        self,
        host: str,
        *,
        may_move: bool,
        towards_etcd: Callable[[], Awaitable[str]],
        moved: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """host: what others dial. may_move: whether the daemon itself listens at every address.

        moved: told of another host, at which workers are to listen. tell: what is wrong; empty: nothing.
        """
        self._host = host
        self._may_move = may_move
        self._towards_etcd = towards_etcd
        self._moved = moved
        self._tell = tell
        self._held: frozenset[str] = frozenset()
        """The addresses of this machine that the host means, while it has them."""
        self._num_gone = 0

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """See whether the address is still there, and do what is to be done when it is not."""
        now = await own_addresses(self._host)
        if now is None:
            return  # a name server that is away takes no address from anybody
        self._held = self._held or now
        if now & self._held:
            self._num_gone = 0
            self._tell("")
            return
        self._num_gone += 1
        if self._num_gone < NUM_LOOKS:
            return
        other = self._host if now else await self._towards_etcd()
        if other and self._may_move:
            log.warning("address_changed", before=self._host, now=other)
            self._host, self._held, self._num_gone = other, now or frozenset({other}), 0
            self._tell("")
            self._moved(other)
            return
        why = "`listen` names it too" if other else "no other address of its own reaches etcd"
        self._tell(f"{self._host} is no address of this machine any more, and {why}: set advertise_host, and restart")


async def own_addresses(host: str) -> frozenset[str] | None:
    """Those that a host means and this machine has; None while nobody says what it means."""
    try:
        found = await resolved(host)
    except (OSError, UnicodeError):
        return None
    return frozenset(str(address[0]) for family, address in found if has_address(family, address))


async def address_towards(members: Iterable[str]) -> str:
    """The address of this machine from which it would dial some member of etcd; empty: there is no way to any."""
    for member in members:
        host, port = split_address(member, "etcd")
        try:
            found = await resolved(host)
        except (OSError, UnicodeError):
            continue
        for family, address in found:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address[0], port, *address[2:]))  # sends nothing: the kernel chooses a route
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return ""
