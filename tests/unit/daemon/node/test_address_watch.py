"""A machine that loses its address: what the daemon does about it, and what it says."""

import errno
import socket

import pytest

from headway.daemon.node import own_host
from headway.daemon.node.own_host import AddressWatch, address_towards, is_here


class Machine:
    """Some addresses, a way to etcd, and what the daemon was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str, may_move: bool = True) -> None:
        self.addresses = {*addresses}
        self.towards_etcd = ""
        self.has_names = True
        self.moves: list[str] = []
        self.trouble = ""
        monkeypatch.setattr(own_host, "resolved", self._resolved)
        monkeypatch.setattr(own_host, "has_address", lambda _, address: address[0] in self.addresses)
        self.watch = AddressWatch(
            "10.0.0.7", may_move=may_move, towards_etcd=self._towards, moved=self.moves.append, tell=self._tell
        )
        self.watch._held = frozenset({"10.0.0.7"})  # at the first look

    async def look(self, times: int = 1) -> None:
        """So often."""
        for _ in range(times):
            await self.watch.look()

    async def _resolved(self, host: str) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        if not self.has_names:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server")
        return [(socket.AF_INET, (host, 0))]

    async def _towards(self) -> str:
        return self.towards_etcd

    def _tell(self, trouble: str) -> None:
        self.trouble = trouble


async def test_a_lost_address_is_replaced_by_the_one_that_reaches_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at the first look, and only once."""
    machine = Machine(monkeypatch, "10.0.0.7")
    await machine.look(3)
    machine.addresses, machine.towards_etcd = {"10.0.0.9"}, "10.0.0.9"
    await machine.look()
    assert machine.moves == []
    await machine.look(3)
    assert (machine.moves, machine.trouble) == (["10.0.0.9"], "")


async def test_an_address_that_comes_back_at_once_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone at every other look: nothing moves."""
    machine = Machine(monkeypatch, "10.0.0.7")
    machine.towards_etcd = "10.0.0.9"
    for number in range(6):
        machine.addresses = set() if number % 2 else {"10.0.0.7"}
        await machine.look()
    assert machine.moves == []


@pytest.mark.parametrize(
    ("may_move", "towards_etcd", "why"),
    [(True, "", "no other address of its own reaches etcd"), (False, "10.0.0.9", "`listen` names it too")],
)
async def test_a_node_without_an_address_says_so_until_it_has_one(
    monkeypatch: pytest.MonkeyPatch, may_move: bool, towards_etcd: str, why: str
) -> None:
    """It stays where it is, says what to do, and stops saying so when the address is back."""
    machine = Machine(monkeypatch, may_move=may_move)
    machine.towards_etcd = towards_etcd
    await machine.look(2)
    assert machine.moves == []
    told = f"10.0.0.7 is no longer an address of this machine, and {why}: set advertise_host"
    assert machine.trouble.startswith(told)
    machine.addresses = {"10.0.0.7"}
    await machine.look()
    assert machine.trouble == ""


async def test_an_unreachable_name_server_does_not_change_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says what the host means, for many looks: nothing moves, and nothing is said."""
    machine = Machine(monkeypatch, "10.0.0.7")
    machine.towards_etcd, machine.has_names = "10.0.0.9", False
    await machine.look(5)
    assert (machine.moves, machine.trouble) == ([], "")


async def test_connections_from_an_address_that_is_gone_are_shut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would notice after 13 s, and a lease lasts 5: the next call dials from the address that there is."""
    machine = Machine(monkeypatch, "10.0.0.7", "127.0.0.8", "127.0.0.9")
    machine.towards_etcd = "127.0.0.9"
    await machine.look()
    with socket.create_server(("127.0.0.1", 0)) as etcd:
        dead, living = (
            socket.create_connection(etcd.getsockname(), timeout=5.0, source_address=(host, 0))
            for host in ("127.0.0.9", "127.0.0.8")
        )
        with dead, living, etcd.accept()[0] as first, etcd.accept()[0] as second:
            machine.watch.glance()
            first.sendall(b"x")
            assert dead.recv(1) == b"x", "nothing is shut while the address is there"
            machine.addresses.remove("127.0.0.9")
            machine.watch.glance()
            assert dead.recv(1) == b""
            second.sendall(b"y")
            assert living.recv(1) == b"y"


def test_a_process_out_of_open_files_keeps_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look gives no answer: connections stay, and workers do not move."""
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")
    assert not is_here("fe80::1%gone")

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(own_host, "bind", refuse)
    assert is_here("192.0.2.1")


async def test_the_way_to_etcd_names_an_own_address() -> None:
    """By the kernel's routes; a member without any is passed over."""
    assert await address_towards(["nowhere.invalid:2379", "127.0.0.1:2379"]) == "127.0.0.1"
    assert await address_towards([]) == ""
