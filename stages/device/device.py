"""What a stage asks of its device: copies to and from the host, and moments of its computation.

Computation is launched, and runs later, in order: that is the device's compute stream. Copies run beside it. No method
makes the host wait, except those named `wait`, which have a deadline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class DeviceLateError(Exception):
    """The device has not done within its deadline what was launched. `device` names it for people."""

    device: str
    what: str
    waited_s: float

    def __str__(self) -> str:
        return f"{self.device}: {self.what} is not done after {self.waited_s:g} s"


class Moment(Protocol):
    """Something that the device reaches after what was launched before."""

    @property
    def is_done(self) -> bool:
        """Return whether the device has reached it. Never waits."""
        ...


class Mark(Moment, Protocol):
    """A moment of the compute stream."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Return the device's seconds between two marks. Both must be done."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when it is done. Raises DeviceLateError."""
        ...


class HostCopy(Moment, Protocol):
    """Tensors on their way from the device to the host. It holds the sources until it is done."""

    def wait(self, timeout_s: float) -> tuple[Tensor, ...]:
        """Return the tensors in host memory, complete. Raises DeviceLateError."""
        ...


class DeviceCopy(Moment, Protocol):
    """Tensors on their way from the host to the device. The host memory is held until they are there."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors on the device. What this thread launches from now on finds them complete."""
        ...


class StageDevice(Protocol):
    """One device. Computation is launched by one thread, which takes arrived copies and sets marks.

    Copies to the host begin in that thread; copies to the device may begin in any.
    """

    @property
    def name(self) -> str:
        """Return the device's name for people: `cuda:0`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Return where its tensors are."""
        ...

    @property
    def is_immediate(self) -> bool:
        """Return whether everything is done when it was launched, and no copy is ever made: the CPU."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes allocated since `begin_peak`; 0: not known."""
        ...

    def begin_peak(self) -> None:
        """Forget the present peak."""
        ...

    def copy_out(
        self, tensors: Sequence[Tensor], *, into: Sequence[Tensor] | None = None, is_bulk: bool = False
    ) -> HostCopy:
        """Begin to copy to the host what the computation launched so far makes of these tensors.

        Nothing launched later may write to them before the copy is done. into: `host_buffer`s of the same forms, free
        until the copy is done; None: the device takes some. is_bulk: large copies, which must not delay others.
        """
        ...

    def copy_in(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        """Begin to copy to the device now. Nobody may write to the tensors before the copy is done."""
        ...

    def mark(self) -> Mark:
        """Return the moment at which all computation launched so far is done."""
        ...

    def after(self, moment: Moment, act: Callable[[], None]) -> None:
        """Call `act` once the moment is done, in a thread of the device; at once if the device is immediate.

        Acts after copies to the host run in the order of their calls, and so do those after copies to the device, and
        those after marks. An exception goes to the device's `on_failure`.
        """
        ...

    def let_go(self) -> None:
        """Free what finished copies have read. The next copy does it too, and after a run there may be none."""
        ...

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory, so that it needs no copy out."""
        ...

    def host_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return an empty tensor in host memory from and to which copies are fast. From any thread."""
        ...

    def close(self) -> None:
        """End its threads. Acts that are not due yet are dropped. Idempotent."""
        ...
