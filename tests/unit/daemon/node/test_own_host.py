"""A daemon starts only where it can listen at the host that others dial, also behind a provider's mapped port."""

import asyncio
import errno
import re
import socket
import threading
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.node.own_host import check_advertised_host, mapped_address
from headway.daemon.node.settings import NodeConfig
from headway.stages.errors import UnavailableError

FOREIGN = "203.0.113.9"
"""An address of a range reserved for documentation: no machine has it."""

Resolved = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]


Refusals = tuple[type[Exception], ...]
LATE_OR_WITHOUT_IPV6 = (UnavailableError, ConfigError)


def node(host: str, *etcd: str) -> NodeConfig:
    """A node that advertises a host; etcd is on this machine unless told."""
    return NodeConfig(name="n", advertise_host=host, etcd=etcd or NodeConfig().etcd)


def names(monkeypatch: pytest.MonkeyPatch, *addresses: str, far: str = FOREIGN) -> None:
    """Every name means these addresses, but those below `far`; an address means itself."""

    def resolve(host: str, port: int, *_: object) -> Resolved:
        is_address = host.replace(".", "").isdigit()
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ((host,) if is_address else (far,) if host.endswith(".far") else addresses)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def refusal(config: NodeConfig, errors: Refusals = (ConfigError,)) -> str:
    """Return the check's message: one line with what to do."""
    with pytest.raises(errors) as caught:
        await check_advertised_host(config)
    assert "\n" not in str(caught.value)
    assert "set an address that this machine has itself" in str(caught.value)
    return str(caught.value)


async def test_an_own_address_and_an_own_name_are_taken() -> None:
    """Loopback, another address of loopback, and what `localhost` means."""
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        await check_advertised_host(node(host))


async def test_an_address_that_no_interface_has_is_refused_and_may_come() -> None:
    """A VPN may bring it later, so another start may succeed. The line names setting and address."""
    said = await refusal(node(FOREIGN), (UnavailableError,))
    assert re.match(rf"advertise_host: '{FOREIGN}': this machine cannot listen at {FOREIGN} \(", said)
    said = await refusal(NodeConfig(name="n", listen=f"{FOREIGN}:7070"), (UnavailableError,))
    assert said.startswith(f"advertise_host: not set, and '{FOREIGN}' stands in for it: this machine cannot listen at")


async def test_an_address_that_the_system_denies_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:

    class Forbidden(socket.socket):
        def bind(self, _address: Any, /) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    assert f"cannot listen at {FOREIGN} (Permission denied)" in await refusal(node(FOREIGN))


async def test_a_name_has_to_mean_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of two own addresses is accepted; one that another machine shares is refused with that address."""
    names(monkeypatch, "127.0.0.1", "127.0.0.2")
    await check_advertised_host(node("name"))
    names(monkeypatch, "127.0.0.1", FOREIGN)
    assert f"cannot listen at {FOREIGN} (" in await refusal(node("name"))


@pytest.mark.parametrize("etcd", ["203.0.113.5:2379", "etcd.far:2379"])
async def test_loopback_is_no_host_where_etcd_is_on_another_machine(monkeypatch: pytest.MonkeyPatch, etcd: str) -> None:
    """The machine's name means 127.0.1.1, and others that dial it reach themselves: told or not, the line says so."""
    names(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    members = ("127.0.0.1:2379", etcd)
    said = await refusal(NodeConfig(name="n", etcd=members))
    assert said.startswith(
        "advertise_host: not set, and 'gpu-7' stands in for it: that is 127.0.1.1, where every machine"
    )
    assert f"etcd at {etcd} " in said
    for host in ("gpu-7", "127.0.0.1"):
        assert "where every machine dials itself" in await refusal(node(host, *members))


async def test_loopback_is_a_host_where_etcd_is_on_loopback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster on one machine, by address or by name; an etcd that nobody knows is told when it is dialled."""
    names(monkeypatch, "127.0.1.1", far="127.0.0.1")
    await check_advertised_host(NodeConfig(name="n"))
    await check_advertised_host(node("gpu-7", "127.0.0.1:2379", "gpu-7:2379", "etcd.far:2379", "0.0.0.0:2379"))
    names(monkeypatch, "127.0.1.1")
    known = socket.getaddrinfo

    def resolve(host: str, port: int, *rest: Any) -> Any:
        if host == "etcd.nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, port, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    await check_advertised_host(node("gpu-7", "etcd.nowhere:2379"))


async def test_one_address_beyond_loopback_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a loopback address and an own one, wherever etcd is."""
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    names(monkeypatch, "127.0.1.1", "203.0.113.7")
    await check_advertised_host(node("gpu-7", "etcd.far:2379"))


async def test_a_slow_name_server_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the answer is awaited, the event loop runs: here it is what lets the answer come."""
    answer = threading.Event()

    def resolve(host: str, port: int, *_: object) -> Resolved:
        assert answer.wait(10), "the event loop stood still"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    asyncio.get_running_loop().call_soon(answer.set)
    await check_advertised_host(node("gpu-7"))


async def test_loopback_without_ipv6_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may mean ::1 where the machine has no IPv6; a name that means nothing else is refused."""
    plain = socket.socket.bind

    class WithoutIPv6(socket.socket):
        def bind(self, address: Any, /) -> None:
            if ":" in address[0]:
                raise OSError(99, "Cannot assign requested address")
            plain(self, address)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    names(monkeypatch, "::1", "127.0.0.1")
    await check_advertised_host(node("localhost"))
    names(monkeypatch, "::1")
    assert "cannot listen at any of its addresses" in await refusal(node("localhost"))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("0.0.0.0", "that is every address, and none to dial"),
        ("::", "that is every address, and none to dial"),
        ("gpu..7", "advertise_host: 'gpu..7': no address and no name"),
        ("x" * 70, "no address and no name"),
        ("2001:db8::9", "advertise_host: '2001:db8::9': this machine cannot listen at"),
        ("[2001:db8::9]", "advertise_host: '2001:db8::9': this machine cannot listen at"),
    ],
)
async def test_a_host_that_cannot_be_dialled_here_is_refused(host: str, told: str) -> None:
    """A wildcard, an empty or a long label, another machine's address; the line names it without brackets."""
    assert told in await refusal(node(host), LATE_OR_WITHOUT_IPV6)


async def test_a_default_host_name_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says that the setting is not set."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    names(monkeypatch, FOREIGN)
    said = await refusal(NodeConfig(name="n"))
    assert said.startswith("advertise_host: not set, and 'gpu-7' stands in for it: this machine cannot listen at")


async def test_an_unknown_name_is_wrong_and_an_absent_name_server_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a port behind it, an address is no longer one. Another start may find the name server."""
    answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def resolve(host: str, port: int, *_: object) -> Resolved:
        raise answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    said = await refusal(node("10.0.0.7:7070"))
    assert "'10.0.0.7:7070': no address and no name that is known here (Name or service not known)" in said
    answer = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(UnavailableError, match="the name server: "):
        await check_advertised_host(node("gpu-7"))


RUNPOD = {"RUNPOD_PUBLIC_IP": "203.0.113.7", "RUNPOD_TCP_PORT_7070": "41022", "RUNPOD_TCP_PORT_22": "41000"}
VAST = {"PUBLIC_IPADDR": "2001:db8::7", "VAST_TCP_PORT_7070": "50123", "VAST_TCP_PORT_70000": "50200"}


@pytest.mark.parametrize(
    ("environment", "port", "address"),
    [
        (RUNPOD, 7070, "203.0.113.7:41022"),
        (VAST, 7070, "[2001:db8::7]:50123"),
        (VAST, 50200, "[2001:db8::7]:50200"),
        (RUNPOD, 7071, ""),
        (RUNPOD, 0, ""),
        ({"RUNPOD_TCP_PORT_7070": "41022"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_7070": "none"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_7070": "70001"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_x": "7071"}, 7071, ""),
        ({}, 7070, ""),
    ],
)
def test_the_address_outside(environment: dict[str, str], port: int, address: str) -> None:
    """The provider's address with the port outside; a port that is not mapped, or not readably, has none."""
    assert mapped_address(environment, port) == address
