"""Links of a stage whose device copies: a link takes frames either from host memory or from the device."""

from dataclasses import replace

from headway.stages.device.device import StageDevice
from headway.stages.links.link import Frame, FrameKind, Link

HOST_KINDS = frozenset({FrameKind.NORM_SQUARES, FrameKind.NORM_TOTAL, FrameKind.STOP, FrameKind.JOB_END})
"""Kinds whose tensors the host makes."""

_ROWS_KINDS = frozenset({FrameKind.ACTIVATION, FrameKind.EVALUATION})
"""Kinds with targets, which only the last stage has on its device."""


class DepartingLink:
    """A `Link` that takes frames from host memory: each frame is copied out, and handed over when that is done.

    All frames of a device leave in the order of `send`, whatever their link is.
    """

    def __init__(self, link: Link, device: StageDevice) -> None:
        self._link = link
        self._device = device

    @property
    def peer(self) -> str:
        """Return the other end's name."""
        return self._link.peer

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Returns at once; an error of the link goes to the device's `on_failure`."""
        first = self._num_on_device(frame)
        copy = self._device.copy_out(frame.tensors[:first])
        rest = frame.tensors[first:]
        self._device.after(copy, lambda: self._link.send(replace(frame, tensors=(*copy.wait(0.0), *rest))))

    def close(self) -> None:
        """Close the link, see `Link`. A frame that is still being copied is dropped."""
        self._link.close()

    def _num_on_device(self, frame: Frame) -> int:
        """Return how many of the first tensors are on the device. Those that only pass are, if they came that way."""
        if frame.kind in HOST_KINDS:
            return 0
        if frame.kind not in _ROWS_KINDS:
            return len(frame.tensors)
        return sum(not self._device.is_on_host(tensor) for tensor in frame.tensors)


class BoardingLink:
    """A `Link` that takes hidden states from the device: targets that waited in host memory are copied in."""

    def __init__(self, link: Link, device: StageDevice) -> None:
        self._link = link
        self._device = device

    @property
    def peer(self) -> str:
        """Return the other end's name."""
        return self._link.peer

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`."""
        if frame.kind in _ROWS_KINDS:
            here = [tensor for tensor in frame.tensors if not self._device.is_on_host(tensor)]
            waiting = frame.tensors[len(here) :]
            if waiting:
                frame = replace(frame, tensors=(*here, *self._device.copy_in(waiting).take()))
        self._link.send(frame)

    def close(self) -> None:
        """Close the link, see `Link`."""
        self._link.close()


def over_host(link: Link, device: StageDevice) -> Link:
    """Return a link that takes frames from host memory, for the frames of a device."""
    return link if device.is_immediate else DepartingLink(link, device)


def over_device(link: Link, device: StageDevice) -> Link:
    """Return a link that takes frames from the device, for the frames of a device."""
    return link if device.is_immediate else BoardingLink(link, device)
