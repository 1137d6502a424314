"""Follows a machine whose address changes under a running daemon.

Workers listen at one address, which the node's record names. When the machine has it no more, the address by which it
reaches etcd takes its place; whether others reach that is for them to prove. Where there is none, the node says so.

A connection from an address that is gone is dead, and gRPC notices after 13 s. The node's lease ends sooner, so such
connections are shut within a second: the next call dials from the address that there is.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from headway.daemon.addresses import split_address
from headway.daemon.node.own_host import has_address, resolved
from headway.stages.own_sockets import end_connections_from, unmapped

log = structlog.get_logger()

GLANCE_EVERY_S: Final = 1.0
"""Between two looks at the addresses from which this process has connections: a lease is renewed with 3 s to spare."""
GLANCES_A_LOOK: Final = 3
"""A look at the host itself may ask a name server."""
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
        self._sources: frozenset[str] = frozenset()
        """The addresses from which this process has connections: those of the host, and the one towards etcd."""

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self.look()
            for _ in range(GLANCES_A_LOOK):
                await asyncio.sleep(GLANCE_EVERY_S)
                self.glance()

    def glance(self) -> None:
        """Shut the connections from addresses that this machine has no more."""
        gone = {address for address in self._sources if not is_here(address)}
        if gone and (num_ended := end_connections_from({unmapped(address) for address in gone})):
            log.warning("dead_connections_shut", addresses=sorted(gone), number=num_ended)

    async def look(self) -> None:
        """See whether the address is still there, and do what is to be done when it is not."""
        now = await own_addresses(self._host)
        if now is None:
            return  # a name server that is away takes no address from anybody
        self._held = self._held or now
        if now & self._held:
            self._num_gone = 0
            self._sources = now | ({await self._towards_etcd()} - {""})
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


def is_here(address: str) -> bool:
    """Whether an address is this machine's. One with the name of a network card goes with the card."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(has_address(family, where) for family, _, _, _, where in found)


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
