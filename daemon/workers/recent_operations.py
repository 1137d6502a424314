"""Asks workers for their last operations and waits a limited time for the answers."""

import asyncio
from collections.abc import Callable
from typing import Final

from headway.proto import control_pb2
from headway.stages.errors import UnavailableError

ANSWER_TIMEOUT_S: Final = 5.0


class RecentOperationsDesk:
    """Questions under way. Lives in the event loop of the main thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[control_pb2.RecentOperations]] = {}
        self._num_asked = 0

    async def ask(self, worker: str, send: Callable[[control_pb2.Order], None]) -> control_pb2.RecentOperations:
        """Return a worker's answer. Raises UnavailableError, naming it, when none comes within ANSWER_TIMEOUT_S."""
        self._num_asked += 1
        request = self._num_asked
        answer: asyncio.Future[control_pb2.RecentOperations] = asyncio.get_running_loop().create_future()
        self._open[request] = answer
        try:
            send(control_pb2.Order(tell_operations=control_pb2.TellOperations(request=request)))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise UnavailableError(worker, f"did not answer within {ANSWER_TIMEOUT_S:g} s") from error
        finally:
            del self._open[request]

    def answered(self, told: control_pb2.RecentOperations) -> None:
        """Note an answer; one that nobody waits for is dropped."""
        answer = self._open.get(told.request)
        if answer is not None and not answer.done():
            answer.set_result(told)
