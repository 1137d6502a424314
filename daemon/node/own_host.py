"""Whether the host that others dial is this machine's: workers listen there and nowhere else."""

import socket
from ipaddress import ip_address
from typing import Any

from headway.daemon.errors import ConfigError
from headway.daemon.node.config import NodeConfig, advertised_host
from headway.stages.errors import UnavailableError

SETTING = "advertise_host"
ADVICE = "set an address that this machine has itself and other nodes can dial; behind a router (NAT) that is a VPN's"


def check_advertised_host(config: NodeConfig) -> None:
    """Raises ConfigError unless the advertised host means this machine, and no other.

    Whoever dials a name takes any of its addresses. A loopback address is nobody else's: where a machine does without
    IPv6, a name may have ::1 beside one that can be listened at. Raises UnavailableError when no name server answers.
    """
    host = advertised_host(config)
    told = repr(host) if config.advertise_host else f"not set, and {host!r} stands in for it"
    num_own, others = 0, []
    for family, address in _resolved(host, told):
        found = ip_address(address[0].partition("%")[0])
        if found.is_unspecified:
            raise ConfigError(f"{told}: that is every address, and none to dial; {ADVICE}", SETTING)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
        except OSError as error:
            if not found.is_loopback:
                others.append(f"{address[0]} ({error.strerror})")
        else:
            num_own += 1
    if others or not num_own:
        where = ", ".join(others) or "any of its addresses"
        raise ConfigError(f"{told}: this machine cannot listen at {where}, where workers would; {ADVICE}", SETTING)


def _resolved(host: str, told: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """What a name means, each address once."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise UnavailableError("the name server", f"no answer to what {host!r} means ({SETTING})") from error
        reason = (isinstance(error, OSError) and error.strerror) or "no host name"
        raise ConfigError(f"{told}: no address and no name that is known here ({reason}); {ADVICE}", SETTING) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
