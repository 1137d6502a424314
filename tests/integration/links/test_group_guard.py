"""Strangers at the ports of a collective link: over real sockets, from this machine's loopback addresses."""

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from headway.daemon.net.certificates import CertificateAuthority
from headway.proto.data_pb2 import KeysReply, KeysRequest
from headway.stages.links.collective import group_guard, rendezvous
from headway.stages.links.collective.group import ACCEPTOR, DIALLER, GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous, admit
from headway.stages.links.collective.rendezvous import KEYS_METHOD, MOST_KEYS, MOST_VALUE_BYTES, LinkKeys
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import FrameKind
from headway.stages.sockets.own_sockets import own_sockets
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.integration.links.conftest import Workers
from tests.integration.links.two_sides import lower_terms

HOST = "127.0.0.1"
LIMIT = timedelta(seconds=20)
SOON_S = 0.3
CONTRACT = FrameContract(forms={FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),)}, max_unacknowledged_frames=1)
CPU = torch.device("cpu")


def listening_ports() -> set[int]:
    """Return the TCP ports at which this process listens."""
    return {
        copy.getsockname()[1]
        for copy in own_sockets()
        if copy.family == socket.AF_INET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def can_connect(port: int, *, source: str = HOST) -> bool:
    """Return whether a connection is made."""
    with socket.socket() as one:
        one.settimeout(SOON_S)
        one.bind((source, 0))
        try:
            one.connect((HOST, port))
        except OSError:
            return False
        return True


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a listening socket like gloo's."""
    with socket.create_server((HOST, 0)) as one:
        yield one


def test_a_filter_admits_one_address_or_none(listener: socket.socket) -> None:
    """The kernel drops what comes from elsewhere, before anybody has to accept it."""
    port = listener.getsockname()[1]
    assert can_connect(port, source="127.0.0.2")
    admit(listener, ip_address("127.0.0.3"))
    assert can_connect(port, source="127.0.0.3")
    assert not can_connect(port, source="127.0.0.2")
    admit(listener, None)
    assert not can_connect(port, source="127.0.0.3")


def test_a_filter_admits_one_ipv6_address() -> None:
    """The same for the other family, whose addresses are four words long."""
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        for source, expected in (("::1", True), ("fe80::1", False), ("::2", False)):
            admit(server, ip_address(source))
            with socket.socket(socket.AF_INET6) as one:
                one.settimeout(SOON_S)
                assert (one.connect_ex(server.getsockname()) == 0) is expected


@dataclass
class Forming:
    """Both sides of one group, in threads."""

    groups: dict[int, GroupOfTwo]
    errors: dict[int, str]


def form(store: Any) -> Forming:
    """Form a group of two in this process."""
    forming = Forming({}, {})

    def side(rank: int) -> None:
        try:
            forming.groups[rank] = GroupOfTwo(Rendezvous(store, HOST, HOST, rank), timeout=LIMIT)
        except RuntimeError as error:
            forming.errors[rank] = str(error)

    threads = [threading.Thread(target=side, args=(rank,)) for rank in (ACCEPTOR, DIALLER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return forming


def test_nobody_connects_to_a_group_that_is_formed() -> None:
    """gloo goes on listening; the kernel drops whoever comes now, and the group works."""
    before = listening_ports()
    forming = form(HashStore())
    assert not forming.errors
    ports = listening_ports() - before
    assert ports
    assert not any(can_connect(port) for port in ports)
    sent, got = torch.arange(8.0), torch.zeros(8)
    receiving = forming.groups[DIALLER].receive_message(got)
    forming.groups[ACCEPTOR].send_message(sent).wait(LIMIT)
    receiving.wait(LIMIT)
    assert torch.equal(sent, got)
    for group in forming.groups.values():
        group.abort()


def test_a_group_forms_beside_sockets_of_other_families(tmp_path: Path) -> None:
    """A library's sockets have addresses of other forms: netlink's are numbers, and CUDA opens such a one."""
    with (
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as netlink,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        netlink.bind((0, 0))
        local.bind(str(tmp_path / "socket"))
        local.listen()
        abstract.bind("\0headway-test-of-families")
        forming = form(HashStore())
    assert not forming.errors
    for group in forming.groups.values():
        group.abort()


def visit(host: str, port: int) -> "subprocess.Popen[str]":
    """Another process, which has connected and stays until its input ends."""
    script = (
        "import socket, sys; one = socket.create_connection((sys.argv[1], int(sys.argv[2]))); print('in', flush=True)"
    )
    command = [sys.executable, "-c", f"{script}; sys.stdin.read()", host, str(port)]
    visitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert visitor.stdout is not None
    assert visitor.stdout.readline() == "in\n"
    return visitor


def test_a_connection_that_is_not_the_peers_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody on the peer's machine connects while the group forms: both sides say so, and take nothing from him."""
    strangers: list[subprocess.Popen[str]] = []
    really_open = group_guard.GroupGuard.open

    def open_and_be_visited(self: group_guard.GroupGuard) -> None:
        really_open(self)
        strangers.append(visit(*next(iter(self._own))))

    monkeypatch.setattr(group_guard.GroupGuard, "open", open_and_be_visited)
    forming = form(HashStore())
    for stranger in strangers:
        stranger.communicate(timeout=LIMIT.total_seconds())
    assert {*forming.errors} == {ACCEPTOR, DIALLER}
    assert all("somebody else has connected" in error for error in forming.errors.values())


def test_an_awaited_link_opens_no_port(workers: Workers) -> None:
    """Keys are exchanged over the links' own server: nothing else listens before the peer has shown its certificate."""
    before = listening_ports()
    terms = lower_terms("quiet", inbox=queue.SimpleQueue(), contract=CONTRACT)
    link = workers.collective[1].accept(terms)
    try:
        assert listening_ports() == before
    finally:
        link.close()


@pytest.fixture
def keys(workers: Workers) -> Iterator[LinkKeys]:
    """Yield the keys of a link that is awaited."""
    loop, _, _ = workers.grpc
    terms = lower_terms("keys", inbox=queue.SimpleQueue(), contract=CONTRACT)
    link = workers.collective[1].accept(terms)

    async def awaited() -> LinkKeys:
        return next(it.link.keys for it in workers.collective[1]._gate if it.terms.job == "keys")

    yield loop.run(awaited(), timeout=LIMIT, what="the keys")
    link.close()


def ask(workers: Workers, identity: TlsIdentity, **fields: Any) -> KeysReply:
    """A call of Keys, as anybody with a certificate can make it. Raises grpc.RpcError."""
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    address = f"{HOST}:{workers.grpc[2].port}"
    with grpc.secure_channel(address, credentials, options=expecting("node")) as channel:
        call: Any = channel.unary_unary(f"/headway.data.Link/{KEYS_METHOD}")
        return KeysReply.FromString(call(KeysRequest(**fields).SerializeToString(), timeout=LIMIT.total_seconds()))


def test_keys_are_for_whoever_has_the_token(
    workers: Workers, identity: TlsIdentity, authority: CertificateAuthority, keys: LinkKeys
) -> None:
    """Another member of the cluster, who was not told the token, reads and writes nothing."""
    keys.store.set("where", "here")
    read = ask(workers, identity, token=keys.token, operation=KeysRequest.GET, key="where")
    assert (read.is_found, read.value) == (True, b"here")
    for token in ("", "0" * 32, keys.token[:-1]):
        with pytest.raises(grpc.RpcError) as caught:
            ask(workers, identity, token=token, operation=KeysRequest.GET, key="where")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    another = TlsIdentity.read(authority.issue("another"))
    with pytest.raises(grpc.RpcError, match="no link has these keys"):
        ask(workers, another, token=keys.token, operation=KeysRequest.GET, key="where")


def test_no_call_waits_for_ever(workers: Workers, identity: TlsIdentity, keys: LinkKeys, monkeypatch: Any) -> None:
    """A key that never comes is waited for as long as the limit says, also by a call that names no number."""
    monkeypatch.setattr(rendezvous, "MOST_WAIT_S", 0.1)
    for seconds in (1e9, float("inf"), float("nan")):
        request = {"operation": KeysRequest.GET, "key": "never", "timeout_s": seconds}
        assert not ask(workers, identity, token=keys.token, **request).is_found


def test_keys_are_few_and_small(workers: Workers, identity: TlsIdentity, keys: LinkKeys) -> None:
    """Not even the peer can fill this process's memory with them."""

    def refusal(**fields: Any) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            ask(workers, identity, token=keys.token, **fields)
        return str(caught.value.details())

    big = bytes(MOST_VALUE_BYTES + 1)
    assert "4096 of value" in refusal(operation=KeysRequest.SET, key="big", value=big)
    assert "256 bytes of key" in refusal(operation=KeysRequest.SET, key="k" * 300)
    for number in range(MOST_KEYS):
        keys.store.set(f"key {number}", "x")
    assert f"at most {MOST_KEYS} keys" in refusal(operation=KeysRequest.SET, key="one more")
    missing = ask(workers, identity, token=keys.token, operation=KeysRequest.GET, key="missing", timeout_s=0.01)
    assert not missing.is_found
