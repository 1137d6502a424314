"""Questions to workers: each gets its own answer, and one that never comes is waited for only so long."""

import asyncio

import pytest

from headway.daemon.workers import recent_operations
from headway.daemon.workers.recent_operations import RecentOperationsDesk
from headway.proto.control_pb2 import Order, RecentOperations
from headway.stages.errors import UnavailableError


async def test_answers_find_their_questions_in_any_order() -> None:
    """Two are asked at once, the second answers first → each asker gets what was said to him."""
    desk, asked = RecentOperationsDesk(), list[Order]()
    answers = [asyncio.create_task(desk.ask(f"worker {k}", asked.append)) for k in range(2)]
    await asyncio.sleep(0)
    for order in reversed(asked):
        request = order.tell_operations.request
        desk.answered(RecentOperations(request=request, generation=100 + request))
    found = [(await answer).generation - 100 for answer in answers]
    assert found == [order.tell_operations.request for order in asked]
    assert len(set(found)) == 2


async def test_a_worker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, say → an error with its name in time; when it answers after all, nobody minds."""
    monkeypatch.setattr(recent_operations, "ANSWER_TIMEOUT_S", 0.05)
    desk, asked = RecentOperationsDesk(), list[Order]()
    with pytest.raises(UnavailableError, match=r"worker cpu:0: did not answer within 0\.05 s"):
        await desk.ask("worker cpu:0", asked.append)
    desk.answered(RecentOperations(request=asked[0].tell_operations.request))
