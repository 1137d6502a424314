"""A worker's end of a link: codes hidden states and gradients, and copies between the device and the host, or waits
until the device has computed.

`send` belongs to the thread that computes, where the tensors are. The thread that computes decodes a frame when it uses
it.
"""

from dataclasses import replace

from headway.stages.device.device import Mark, StageDevice
from headway.stages.links.codec import Codec
from headway.stages.links.compression import Feedback, encode
from headway.stages.links.link import Frame, FrameKind, Link
from headway.stages.spec import TrainSpec

HOST_KINDS = frozenset({FrameKind.NORM_SQUARES, FrameKind.NORM_TOTAL, FrameKind.STOP, FrameKind.JOB_END})
"""Kinds whose tensors the host makes."""

_ROWS_KINDS = frozenset({FrameKind.ACTIVATION, FrameKind.EVALUATION})
"""Kinds with targets, which only the last stage has on its device."""


class WorkerLink:
    """A `Link` around one that takes frames from host memory, or, by `to_device`, from the device."""

    def __init__(
        self,
        link: Link,
        device: StageDevice,
        codec: Codec = Codec.NONE,
        train: TrainSpec | None = None,
        *,
        to_device: bool = False,
    ) -> None:
        """train: decides on the feedback of a codec. to_device: the link takes frames from the device's memory."""
        self._link = link
        self._device = device
        self._codec = codec
        self._to_device = to_device
        self._launched: Mark | None = None
        """When the newest frame of the device is computed; `send` alone changes it."""
        self._feedback: Feedback | None = None
        if codec is Codec.INT8 and train is not None and train.wire_feedback:
            self._feedback = Feedback(codec, num_groups=train.reduction_groups)

    @property
    def peer(self) -> str:
        """Return the other end's name."""
        return self._link.peer

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Returns at once; a later error goes to the device's `on_failure`.

        A frame reaches the link when it is computed: the peer's device must not wait, beside its own computation, for
        data that does not exist yet. All frames of a device that are copied to the host leave in the order of `send`,
        whatever their link is; those of a link to a device, in its order.
        """
        frame = self._coded(frame)
        if self._device.is_immediate:
            self._link.send(frame)
        elif self._to_device:
            self._send_computed(self._on_device(frame))
        else:
            first = self._num_on_device(frame)
            copy = self._device.copy_out(frame.tensors[:first])
            rest = frame.tensors[first:]
            self._device.after(copy, lambda: self._link.send(replace(frame, tensors=(*copy.wait(0.0), *rest))))

    def close(self) -> None:
        """Close the link, see `Link`. A frame that is still being copied is dropped."""
        self._link.close()

    def _send_computed(self, frame: Frame) -> None:
        # Here, so that the mark comes after a copy: no other thread has a place in the order of computation.
        frame = replace(frame, tensors=tuple(tensor.detach().contiguous() for tensor in frame.tensors))
        if not all(map(self._device.is_on_host, frame.tensors)):
            self._launched = self._device.mark()
        if self._launched is None:
            self._link.send(frame)
        else:
            self._device.after(self._launched, lambda: self._link.send(frame))

    def _coded(self, frame: Frame) -> Frame:
        """Only hidden states and their gradient are coded."""
        if not self._codec or frame.kind not in (FrameKind.ACTIVATION, FrameKind.GRADIENT):
            return frame
        values, *rest = frame.tensors
        if frame.kind is FrameKind.GRADIENT and self._feedback is not None:
            coded = self._feedback.encode(values, frame.microbatch)
        else:
            coded = encode(values, self._codec)
        return replace(frame, tensors=(*coded, *rest), codec=self._codec)

    def _num_on_device(self, frame: Frame) -> int:
        """Return how many of the first tensors are on the device. Those that only pass are, if they came that way."""
        if frame.kind in HOST_KINDS:
            return 0
        if frame.kind not in _ROWS_KINDS:
            return len(frame.tensors)
        return sum(not self._device.is_on_host(tensor) for tensor in frame.tensors)

    def _on_device(self, frame: Frame) -> Frame:
        """Targets that waited in host memory are copied in."""
        if frame.kind not in _ROWS_KINDS:
            return frame
        here = [tensor for tensor in frame.tensors if not self._device.is_on_host(tensor)]
        waiting = frame.tensors[len(here) :]
        return replace(frame, tensors=(*here, *self._device.copy_in(waiting).take())) if waiting else frame
