"""What one run of a stage waits for from its device: each thing is heard of through the stage's inbox.

On an immediate device everything is known at once, and nothing goes through the inbox.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.stages.device.device import DeviceCopy, HostCopy, Mark, StageDevice


def numbers_of(tensor: Tensor) -> list[float]:
    """Return the numbers of a tensor in host memory, flat, whatever its shape is."""
    assert tensor.is_cpu, "the numbers of a tensor on a device are known only after a copy"
    numbers: list[float] = tensor.reshape(-1).tolist()
    return numbers


@dataclass(slots=True, eq=False)
class DeviceDone:
    """The device of a run has done something: the run's thread calls `act`. None: the run is over."""

    run: "RunEvents"
    act: Callable[[], None] | None


class Inbox(Protocol):
    """Receives what is done. Must never block: `queue.SimpleQueue` fits."""

    def put(self, item: DeviceDone) -> None: ...


class _Nowhere:
    """The inbox of a run on an immediate device, which tells nothing later."""

    def put(self, item: DeviceDone) -> None:
        raise AssertionError(f"nobody hears of {item}")


class RunEvents:
    """One run's, in its thread. Whatever an earlier run still waited for is ignored, and keeps nothing of it alive."""

    def __init__(self, device: StageDevice, inbox: Inbox | None) -> None:
        """inbox: of the stage; None: the device is immediate."""
        self._pending: set[DeviceDone] = set()
        self._device = device
        self._inbox = inbox or _Nowhere()

    @property
    def num_pending(self) -> int:
        """Return the number of things that have not been heard of."""
        return len(self._pending)

    def when_copied(self, tensors: Sequence[Tensor], act: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Call `act` with the values of these tensors, in host memory, as soon as they are known."""
        self.when_done(self._device.copy_out(tensors), act)

    def when_done(self, copy: HostCopy, act: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Call `act` with the values of a copy to the host as soon as they are there."""
        if self._device.is_immediate:
            act(copy.wait(0.0))
            return
        done = self._expected(lambda: act(copy.wait(0.0)))
        self._device.after(copy, lambda: self._inbox.put(done))

    def when_arrived(self, copy: DeviceCopy, act: Callable[[], None]) -> None:
        """Call `act` when the copy is on the device, so that the computation need not wait for it."""
        if self._device.is_immediate:
            act()
            return
        done = self._expected(act)
        self._device.after(copy, lambda: self._inbox.put(done))

    def when_marked(self, mark: Mark, at_once: Callable[[], None], act: Callable[[], None]) -> None:
        """Call `act` after a mark. at_once: is called before, in a thread of the device; it may note the time."""
        done = self._expected(act)

        def tell() -> None:
            at_once()
            self._inbox.put(done)

        self._device.after(mark, tell)

    def heard(self, item: DeviceDone) -> None:
        """Take an item of the inbox."""
        if item.run is self and item.act is not None:
            self._pending.remove(item)
            item.act()

    def close(self) -> None:
        """End the run. What it waited for may lie in the inbox until the next run begins, and must not keep layers."""
        for item in self._pending:
            item.act = None
        self._pending.clear()

    def _expected(self, act: Callable[[], None]) -> DeviceDone:
        item = DeviceDone(self, act)
        self._pending.add(item)
        return item
