"""Takes a stage from its boundary to the next stop: whatever has arrived first, then the next operation, else a wait.

One inbox has everything that arrives: frames, orders, ends of snapshots, work that the device has done. `take` gets
each item, in the thread of `run` and between two operations. It hands the executor what is for the stage; the loop
knows nothing of the rest.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from headway.stages.device.device import DeviceLateError
from headway.stages.errors import UnavailableError
from headway.stages.ids import Boundary
from headway.stages.schedule.next_op import WAIT, Awaited, Wait, awaited, next_op
from headway.stages.schedule.operations import Op
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.stage.executor import Executor
from headway.stages.telemetry.goodput import BUBBLE, SNAPSHOT, waiting_for

ItemT = TypeVar("ItemT")


class StageLoop(Generic[ItemT]):
    """The thread that calls `run` is the only one that touches the stage."""

    def __init__(
        self,
        executor: Executor,
        inbox: "SimpleQueue[ItemT]",
        take: Callable[[ItemT], None],
        *,
        choose: Callable[[ScheduleState], Op | Wait] = next_op,
    ) -> None:
        """choose: what to do next."""
        self.executor = executor
        self._inbox = inbox
        self._take = take
        self._choose = choose
        # Read by others, from any thread, at any time.
        self.waiting_for = ""
        """The neighbour that an idle stage waits for."""
        self.is_runnable = False
        """Whether an operation is running or could run."""

    def run(self) -> Boundary:
        """Compute until the stop boundary, which is the job's last one unless somebody says otherwise. Returns it.

        Raises UnavailableError when a neighbour is gone, ProtocolError when it breaks the rules, DeviceLateError when
        the own device has stopped, NonFiniteLossError, and whatever `take`, the observer and the layers raise.
        """
        executor, inbox, take, choose = self.executor, self._inbox, self._take, self._choose
        state = executor.state
        executor.begin()
        self.is_runnable = True
        try:
            while True:
                while not inbox.empty():
                    take(inbox.get_nowait())
                if state.is_done:
                    if executor.settle():
                        break
                    self._wait_for_device()
                    continue
                op = WAIT if executor.ops.is_full else choose(state)
                if op is not WAIT:
                    executor.execute(op)
                elif executor.events.num_pending:
                    self._wait_for_device()
                else:
                    self._wait()
            return executor.end()
        finally:
            self.is_runnable = False
            executor.close()

    def _wait(self) -> None:
        executor = self.executor
        state = executor.state
        what = awaited(state)
        if what is Awaited.SNAPSHOT:
            self._wait_for_snapshot()
            return
        peer, patience_s = executor.awaited_peer(what), executor.context.patience_s
        # Without delay nobody may begin the next batch, so a stage fills and drains: it cannot but wait while no batch
        # is half forwarded.
        is_inherent = (
            state.newest_elsewhere == state.backwards.batch
            and state.forwards.num_done == 0
            and what not in (Awaited.REDUCTION, Awaited.SHARES)
        )
        executor.observer.waits(BUBBLE if is_inherent else waiting_for(peer), perf_counter())
        try:
            item = self._next_item(peer, patience_s)
        except Empty:
            raise UnavailableError(peer, f"no {what.value} arrived for {patience_s:g} s") from None
        self._take(item)

    def _wait_for_device(self) -> None:
        """The device is at work, so the stage does not wait for its neighbours. A frame may come first."""
        executor = self.executor
        patience_s = executor.context.patience_s
        try:
            item = self._inbox.get(timeout=patience_s)
        except Empty:
            raise DeviceLateError(executor.device.name, "what was launched", patience_s) from None
        self._take(item)

    def _wait_for_snapshot(self) -> None:
        """Only the writer keeps the next update from running. It is given up rather than waited for in vain."""
        snapshots = self.executor.snapshots
        assert snapshots is not None
        began = perf_counter()
        self.executor.observer.waits(SNAPSHOT, began)
        try:
            item = self._next_item("the snapshot writer", snapshots.patience_s)
        except Empty:
            snapshots.give_up()  # its end is in the inbox now
            item = self._inbox.get()
        snapshots.waited(perf_counter() - began)
        self._take(item)

    def _next_item(self, peer: str, patience_s: float) -> ItemT:
        self.waiting_for, self.is_runnable = peer, False
        try:
            return self._inbox.get(timeout=patience_s)
        finally:
            self.waiting_for, self.is_runnable = "", True
