"""What a connection says first: TLS for the daemon, a CONNECT for a server by its name, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.net.front import MAX_HEAD_BYTES, Opening, Wish, read_opening

GRPC = b"CONNECT 0123456789abcdef:443 HTTP/1.1\r\nHost: 0123456789abcdef:443\r\nUser-Agent: grpc-httpcli/0.0\r\n\r\n"


def test_tls_is_for_the_daemon() -> None:
    assert read_opening(b"\x16") == Opening(Wish.DAEMON, "", 0)
    assert read_opening(b"\x16\x03\x01\x02\x00\x01") == Opening(Wish.DAEMON, "", 0)


@pytest.mark.parametrize("length", range(len(GRPC)))
def test_a_connect_needs_its_whole_head(length: int) -> None:
    assert read_opening(GRPC[:length]) is None


def test_a_connect_names_a_server() -> None:
    """What follows the head belongs to the server."""
    assert read_opening(GRPC) == read_opening(GRPC + b"\x16\x03") == Opening(Wish.SERVER, "0123456789abcdef", len(GRPC))


def test_a_node_may_stand_by() -> None:
    """With its token; and whoever wants it names a server there behind the node."""
    assert read_opening(b"STANDBY 00ff:0 HTTP/1.1\r\n\r\n") == Opening(Wish.STANDBY, "00ff", 27)
    assert read_opening(b"CONNECT node-1.x~abc:443 HTTP/1.1\r\n\r\n") == Opening(Wish.SERVER, "node-1.x~abc", 37)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x00",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"CONNECT a/b:443 HTTP/1.1\r\n\r\n",
        b"CONNECT ../daemon:443 HTTP/1.1\r\n\r\n",
        b"CONNECT name HTTP/1.1\r\n\r\n",
        b"CONNECT " + b"a" * 301 + b":443 HTTP/1.1\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\nHost: a\r\n\r\n",
        GRPC[:-2] + b"X: " + b"y" * MAX_HEAD_BYTES,
    ],
)
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"TLS|head|name"):
        read_opening(raw)


@given(st.binary(max_size=2 * MAX_HEAD_BYTES))
def test_no_bytes_break_it(raw: bytes) -> None:
    """Any bytes are for the daemon, incomplete or refused."""
    try:
        found = read_opening(raw)
    except ValueError:
        return
    assert found is None or found.name == "" or raw.startswith((b"CONNECT ", b"STANDBY "))
