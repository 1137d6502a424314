"""An asyncio loop in its own thread, for a process whose main thread computes.

All work that waits for the network runs here: gRPC's asyncio wants one loop per process. The main thread hands work
over and never touches objects of the loop. No exception is lost. An exception of a background task or a callback goes
to `on_failure`, or without one is raised by `stop`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple, Unpack

ResultT = TypeVar("ResultT")
ArgumentsT = TypeVarTuple("ArgumentsT")

START_TIMEOUT = timedelta(seconds=10)
STOP_TIMEOUT_S = 5.0
_GRPC_POLLER = "PollerCompletionQueue._handle_events"


class LoopThread:
    """Start once, use from any thread, stop once. `on_failure` is called in the loop's thread and must not block."""

    def __init__(
        self, name: str = "headway-loop", *, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_loop_exception)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._ready = threading.Event()
        self._on_failure = on_failure
        self._failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, for code that runs inside it."""
        return self._loop

    def start(self) -> None:
        """Return when the loop runs."""
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT.total_seconds()):
            raise TimeoutError(f"thread {self._thread.name}: its loop did not start within {START_TIMEOUT}")

    def run(self, coroutine: Coroutine[Any, Any, ResultT], *, timeout: timedelta, what: str) -> ResultT:
        """Run a coroutine in the loop; return its result, or raise its exception.

        Raises TimeoutError naming `what` after `timeout`; the coroutine is cancelled then.
        """
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        future: Future[ResultT] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout.total_seconds())
        except TimeoutError as error:
            if future.cancel():
                raise TimeoutError(f"{what}: not done within {timeout.total_seconds():g} s") from error
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run a coroutine in the background, from any thread. Its exception is a failure of the loop."""
        self._loop.call_soon_threadsafe(self._create_task, coroutine, name)

    def call_soon(self, callback: Callable[[Unpack[ArgumentsT]], object], *args: *ArgumentsT) -> None:
        """Call a function in the loop, from any thread. Does nothing once the loop has been stopped."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def stop(self) -> None:
        """Cancel all tasks, end the thread and close the loop. Raises the first unreported failure."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"thread {self._thread.name}: not ended within {STOP_TIMEOUT_S:g} s")
        if self._failures:
            raise self._failures[0]

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._ready.set)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _create_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _on_loop_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if _GRPC_POLLER in str(context.get("message")) and str(error) == "Event loop is closed":
            return  # gRPC has one poller for all loops of a process, and another of them has ended
        self._fail(error if isinstance(error, BaseException) else RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            self._failures.append(error)
