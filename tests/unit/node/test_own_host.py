"""A daemon starts only where it can listen at the host that others dial."""

import re
import socket
from typing import Any

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.node.config import NodeConfig
from headway.daemon.node.own_host import check_advertised_host
from headway.stages.errors import UnavailableError

FOREIGN = "203.0.113.9"
"""Of a range that is kept for documentation: no machine's."""

Resolved = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]


def node(host: str) -> NodeConfig:
    """A node that advertises a host."""
    return NodeConfig(name="n", advertise_host=host)


def names(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name means these addresses."""

    def resolve(host: str, port: int, **_: object) -> Resolved:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def refusal(config: NodeConfig) -> str:
    """What the check says; one line with what to do."""
    with pytest.raises(ConfigError) as caught:
        check_advertised_host(config)
    assert "\n" not in str(caught.value)
    assert "set an address that this machine has itself" in str(caught.value)
    return str(caught.value)


def test_an_own_address_and_an_own_name_are_taken() -> None:
    """Loopback, another address of loopback, and what `localhost` means."""
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        check_advertised_host(node(host))


def test_another_machines_address_is_refused() -> None:
    """An address that no interface has, as behind NAT: the line names the setting and the address."""
    assert re.match(rf"advertise_host: '{FOREIGN}': this machine cannot listen at {FOREIGN} \(", refusal(node(FOREIGN)))


def test_another_machines_ipv6_address_is_refused() -> None:
    """With brackets or without, the line names the address alone."""
    for told in ("2001:db8::9", "[2001:db8::9]"):
        assert refusal(node(told)).startswith("advertise_host: '2001:db8::9': this machine cannot listen at")


def test_a_name_has_to_mean_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of two own addresses is taken; one that another machine shares is not, and the line names that address."""
    names(monkeypatch, "127.0.0.1", "127.0.0.2")
    check_advertised_host(node("name"))
    names(monkeypatch, "127.0.0.1", FOREIGN)
    assert f"cannot listen at {FOREIGN} (" in refusal(node("name"))


def test_loopback_without_ipv6_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may mean ::1 where the machine has no IPv6; a name that means nothing else is refused."""
    plain = socket.socket.bind

    class WithoutIPv6(socket.socket):
        def bind(self, address: Any, /) -> None:
            if ":" in address[0]:
                raise OSError(99, "Cannot assign requested address")
            plain(self, address)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    names(monkeypatch, "::1", "127.0.0.1")
    check_advertised_host(node("localhost"))
    names(monkeypatch, "::1")
    assert "cannot listen at any of its addresses" in refusal(node("localhost"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_cannot_be_dialled(host: str) -> None:
    """It can be listened at, and others would dial themselves."""
    assert "that is every address, and none to dial" in refusal(node(host))


@pytest.mark.parametrize("host", ["gpu..7", "x" * 70])
def test_what_is_no_host_is_refused(host: str) -> None:
    """An empty or a long label: no address and no name."""
    assert f"advertise_host: '{host}': no address and no name" in refusal(node(host))


def test_a_host_that_nobody_told_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host name stands in, and means another machine: the line says that the setting is not set."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    names(monkeypatch, FOREIGN)
    said = refusal(NodeConfig(name="n"))
    assert said.startswith("advertise_host: not set, and 'gpu-7' stands in for it: this machine cannot listen at")


def test_a_name_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a port behind it, an address is no longer one."""

    def resolve(host: str, port: int, **_: object) -> Resolved:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    said = refusal(node("10.0.0.7:7070"))
    assert "'10.0.0.7:7070': no address and no name that is known here (Name or service not known)" in said


def test_an_absent_name_server_is_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says what the name means: an error that another start may cure."""

    def resolve(host: str, port: int, **_: object) -> Resolved:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(UnavailableError, match="the name server: "):
        check_advertised_host(node("gpu-7"))
