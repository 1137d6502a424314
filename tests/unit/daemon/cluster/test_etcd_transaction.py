"""Ranges and transactions in etcd's notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.cluster.transaction import Delete, Put, prefix_end, range_start, transaction_request


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"a\xff\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0"), (b"\0", b"\x01")],
)
def test_the_end_of_a_prefix_is_the_next_key_after_all_of_them(prefix: bytes, end: bytes) -> None:
    """The last byte rises by one; 0xff cannot and is dropped; what has no end is etcd's zero byte."""
    assert prefix_end(prefix) == end


@given(prefix=st.binary(max_size=4), key=st.binary(min_size=1, max_size=6))
def test_a_key_is_in_the_range_exactly_if_it_has_the_prefix(prefix: bytes, key: bytes) -> None:
    """Any key, any prefix: start <= key < end, with the zero byte for no end."""
    start, end = range_start(prefix), prefix_end(prefix)
    assert (start <= key and (end == b"\0" or key < end)) == key.startswith(prefix)


def test_a_key_that_is_changed_twice_is_refused_before_etcd_does() -> None:
    """Put and delete of one key in one transaction: ValueError."""
    with pytest.raises(ValueError, match="once"):
        transaction_request((), (Put("/a", b""), Delete("/a")))
