"""Follows a machine whose address changes under a running daemon.

Workers listen at one address, which the node's record names. If the machine loses it, the address that reaches etcd
takes its place, and peers then prove whether they reach it. If there is no such address, the node reports that.

gRPC needs 13 s to notice that a connection from a lost address is dead, and the node's lease ends sooner. So such
connections are shut within a second, and the next call dials from the present address.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from headway.daemon.addresses import split_address
from headway.daemon.node.own_host import has_address, resolved
from headway.stages.sockets.own_sockets import end_connections_from, unmapped

log = structlog.get_logger()

GLANCE_EVERY_S: Final = 1.0
"""Interval of looks at the addresses of this process's connections: a lease is renewed with 3 s to spare."""
GLANCES_A_LOOK: Final = 3
"""Number of such looks per look at the host itself, which may ask a name server."""
NUM_LOOKS: Final = 2
"""Number of looks in a row after which an address counts as gone: DHCP may renew a lease between two looks."""


class AddressWatch:
    """Watches the address; `run` until cancelled."""

    def __init__(
        self,
        host: str,
        *,
        may_move: bool,
        towards_etcd: Callable[[], Awaitable[str]],
        moved: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """host: the host that others dial. may_move: whether the daemon itself listens at every address.

        moved: receives another host, at which workers then listen. tell: receives the fault; empty: there is none.
        """
        self._host = host
        self._may_move = may_move
        self._towards_etcd = towards_etcd
        self._moved = moved
        self._tell = tell
        self._held: frozenset[str] = frozenset()
        """Addresses that the host resolves to and that this machine has."""
        self._num_gone = 0
        self._sources: frozenset[str] = frozenset()
        """Addresses from which this process has connections: those of the host, and the one towards etcd."""

    async def run(self) -> None:
        """Look repeatedly."""
        while True:
            await self.look()
            for _ in range(GLANCES_A_LOOK):
                await asyncio.sleep(GLANCE_EVERY_S)
                self.glance()

    def glance(self) -> None:
        """Shut the connections from addresses that this machine has lost."""
        gone = {address for address in self._sources if not is_here(address)}
        if gone and (num_ended := end_connections_from({unmapped(address) for address in gone})):
            log.warning("dead_connections_shut", addresses=sorted(gone), number=num_ended)

    async def look(self) -> None:
        """Check that this machine still has the address, and react if it does not."""
        now = await own_addresses(self._host)
        if now is None:
            return  # an outage of the name server changes no address
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
        self._tell(f"{self._host} is no longer an address of this machine, and {why}: set advertise_host, and restart")


def is_here(address: str) -> bool:
    """Return whether an address is this machine's. An address with a network card's name goes with the card."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(has_address(family, where) for family, _, _, _, where in found)


async def own_addresses(host: str) -> frozenset[str] | None:
    """Return this machine's addresses that a host means; None while the name cannot be resolved."""
    try:
        found = await resolved(host)
    except (OSError, UnicodeError):
        return None
    return frozenset(str(address[0]) for family, address in found if has_address(family, address))


async def address_towards(members: Iterable[str]) -> str:
    """Return the address from which this machine would dial an etcd member; empty: no route exists."""
    for member in members:
        host, port = split_address(member, "etcd")
        try:
            found = await resolved(host)
        except (OSError, UnicodeError):
            continue
        for family, address in found:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address[0], port, *address[2:]))  # nothing is sent: the kernel chooses a route
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return ""
