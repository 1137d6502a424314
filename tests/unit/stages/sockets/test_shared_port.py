"""Which port a process dials for an address, and which next when one led nowhere."""

import grpc
import pytest

from headway.stages.sockets import shared_port
from headway.stages.sockets.shared_port import (
    channel_to,
    dial_within,
    dialled_port,
    listening_port,
    listening_ports,
    shared_address,
)

OUTER, INNER = "203.0.113.7:41022", "127.0.0.1:7070"


@pytest.mark.parametrize("behind", ["", "/worker", "/node-e~", "/node-e~worker"])
def test_a_mapped_port_of_this_machine_is_dialled_inside(monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    """A router may send nothing back to where it came from; nodes that stand by there are reached inside too."""
    monkeypatch.setattr(shared_port, "_inner", {})
    assert dialled_port(f"{OUTER}{behind}") == OUTER
    dial_within(OUTER, INNER)
    assert dialled_port(f"{OUTER}{behind}") == INNER
    assert listening_port(f"{OUTER}{behind}") == OUTER
    assert dialled_port(f"203.0.113.7:7070{behind}") == "203.0.113.7:7070"
    target, options = shared_port._way(f"{OUTER}{behind}")
    assert (target, *options) == (INNER, *([("grpc.http_connect_server", f"{behind[1:]}:443")] if behind else []))


def test_each_attempt_that_led_nowhere_is_followed_by_the_next_relay() -> None:
    address = shared_address("one:1,[::2]:2,three:3/far~", "0123456789abcdef")
    assert listening_ports(address) == ("one:1", "[::2]:2", "three:3")
    assert [listening_port(address, attempt) for attempt in range(4)] == ["one:1", "[::2]:2", "three:3", "one:1"]


@pytest.mark.parametrize("address", ["one:1", "one:1/worker"])
def test_a_single_port_is_dialled_again(address: str) -> None:
    assert [listening_port(address, attempt) for attempt in range(2)] == ["one:1", "one:1"]


def test_an_address_of_very_many_ports_is_dialled_at_a_few() -> None:
    """Any node may write one, and each silent port takes whoever dials it two seconds."""
    address = f"{','.join(f'silent:{port}' for port in range(1, 300))}/evil~"
    assert listening_ports(address) == tuple(f"silent:{port}" for port in range(1, 9))
    assert listening_port(address, 8) == "silent:1"


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variables that gRPC knows name a proxy that nobody serves: a call comes to its server all the same."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def answer(request: bytes, _: object) -> bytes:
        return request

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"m": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel_to(f"127.0.0.1:{port}", None) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/m")
            assert await call(b"here", timeout=10.0) == b"here"
    finally:
        await server.stop(None)
