"""Asks workers for their last operations and waits for the answers, for as long as somebody would."""

import asyncio
from collections.abc import Callable
from typing import Final

from headway.proto import control_pb2
from headway.stages.errors import UnavailableError

ANSWER_TIMEOUT_S: Final = 5.0


class RecentOperationsDesk:
    """Questions that are under way. Lives in the event loop of the main thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[control_pb2.RecentOperations]] = {}
        self._num_asked = 0

    async def ask(self, worker: str, send: Callable[[control_pb2.Order], None]) -> control_pb2.RecentOperations:
        """What a worker answers. Raises UnavailableError, naming it, when it does not within ANSWER_TIMEOUT_S."""
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
        """An answer came; one that nobody waits for any more is dropped."""
        answer = self._open.get(told.request)
        if answer is not None and not answer.done():
            answer.set_result(told)
