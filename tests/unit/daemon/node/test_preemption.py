"""Notices of clouds: what each answer means, and a watch against a server that answers as theirs do."""

import asyncio
import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.node.preemption import (
    DEFAULT_NOTICE_S,
    MOST_NOTICE_S,
    Cloud,
    PreemptionWatch,
    leave_within_s,
    notice_s,
)
from tests.rigs.metadata_server import PREEMPT, Metadata, azure

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
CLOUDS: tuple[Cloud, ...] = ("aws", "gcp", "azure")


@pytest.mark.parametrize(
    ("cloud", "status", "body", "left"),
    [
        ("aws", 404, "<html>Not Found</html>", None),
        ("aws", 200, '{"action": "terminate", "time": "2026-01-01T12:02:00Z"}', 120.0),
        ("aws", 200, '{"action": "stop", "time": "2026-01-01T12:01:30Z"}', 90.0),
        ("aws", 200, '{"action": "hibernate", "time": "2026-01-01T11:59:00Z"}', 0.0),
        ("aws", 200, '{"action": "stop"}', DEFAULT_NOTICE_S),
        ("aws", 200, '{"action": "stop", "time": "2099-01-01T12:00:00Z"}', MOST_NOTICE_S),
        ("gcp", 200, "FALSE", None),
        ("gcp", 200, "TRUE\n", DEFAULT_NOTICE_S),
        ("azure", 200, azure(), None),
        ("azure", 200, azure(PREEMPT), 40.0),
        ("azure", 200, azure(PREEMPT | {"Resources": ["yours"]}), None),
        ("azure", 200, azure(PREEMPT | {"EventType": "Freeze"}), None),
        ("azure", 200, azure(PREEMPT | {"NotBefore": ""}), DEFAULT_NOTICE_S),
        ("azure", 200, azure(PREEMPT, PREEMPT | {"NotBefore": "Thu, 01 Jan 2026 12:00:30 GMT"}), 30.0),
    ],
)
def test_an_answer_says_how_long_the_machine_has(cloud: Cloud, status: int, body: str, left: float | None) -> None:
    """The examples of the clouds' pages, and what differs from them by one thing."""
    assert notice_s(cloud, status, body, own_name="mine", now=NOW) == left


@pytest.mark.parametrize(
    ("cloud", "status", "body"),
    [("gcp", 404, ""), ("aws", 401, ""), ("azure", 500, "{}"), ("aws", 200, "<html>"), ("azure", 200, "[]")],
)
def test_an_answer_that_is_none_is_an_error(cloud: Cloud, status: int, body: str) -> None:
    """Another cloud, an expired token, a fault: nobody leaves because of it."""
    with pytest.raises(ValueError, match=r"."):
        notice_s(cloud, status, body, own_name="mine", now=NOW)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = ["action", "time", "Events", "EventType", "Resources", "NotBefore"]
    return st.dictionaries(st.sampled_from(names), inner)


@given(
    cloud=st.sampled_from(CLOUDS),
    status=st.sampled_from([200, 404, 500]),
    body=st.one_of(
        st.text(max_size=50),
        st.recursive(st.none() | st.text() | st.integers(), lambda part: st.lists(part) | _objects(part)).map(
            json.dumps
        ),
    ),
)
def test_no_answer_is_too_strange(cloud: Cloud, status: int, body: str) -> None:
    """Whatever comes is a time within limits, nothing, or a ValueError."""
    try:
        left = notice_s(cloud, status, body, own_name="mine", now=NOW)
    except ValueError:
        return
    assert left is None or 0 <= left <= MOST_NOTICE_S


def test_a_clean_leave_fits_into_the_notice() -> None:
    """Eight seconds stay for the end, half of a short notice; a shorter setting of the user's counts."""
    assert [leave_within_s(notice, 120.0) for notice in (120.0, 30.0, 4.0, 0.0)] == [112.0, 22.0, 2.0, 0.0]
    assert leave_within_s(120.0, 10.0) == 10.0


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    """A server of one test."""
    with Metadata() as server:
        yield server


@pytest.mark.parametrize("cloud", CLOUDS)
async def test_a_notice_is_reported_once(metadata: Metadata, cloud: Cloud) -> None:
    """Faults of the server, an expired token and other machines' events are no notices; the notice ends the watch."""
    told: list[float] = []
    port = metadata.port
    metadata.num_faults = 2
    watch = PreemptionWatch(cloud, told.append, host="127.0.0.1", port=port, interval_s=0.01)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        while metadata.num_faults:
            await asyncio.sleep(0.01)
        metadata.num_tokens += 1  # the token from before counts no more
        seen = metadata.num_answered
        while metadata.num_answered < seen + 8:
            await asyncio.sleep(0.01)
        assert told == []
        metadata.is_taken = True
        await running
    (left,) = told
    assert left == DEFAULT_NOTICE_S if cloud == "gcp" else 50 < left <= 120


async def test_a_server_that_is_away_is_no_notice() -> None:
    """A machine outside of any cloud: the watch asks on, and says so once."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        watch = PreemptionWatch(
            "aws", lambda _: pytest.fail("no notice"), host="127.0.0.1", port=closed.getsockname()[1], interval_s=0.01
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await watch.run()
