"""A link that codes hidden states and gradients: `send` encodes them. The thread that computes decodes a frame when it
uses it.
"""

from dataclasses import replace

from headway.stages.links.codec import Codec
from headway.stages.links.compression import Feedback, encode
from headway.stages.links.link import Frame, FrameKind, Link
from headway.stages.spec import TrainSpec


class CodedLink:
    """A `Link` around another one. `send` belongs to the thread that computes, where the tensors are."""

    def __init__(self, link: Link, codec: Codec, train: TrainSpec) -> None:
        self._link = link
        self._codec = codec
        has_feedback = codec is Codec.INT8 and train.wire_feedback
        self._feedback = Feedback(codec, num_groups=train.reduction_groups) if has_feedback else None

    @property
    def peer(self) -> str:
        """Return the other end's name."""
        return self._link.peer

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Frames other than hidden states and their gradient are not coded."""
        if frame.kind is FrameKind.ACTIVATION:
            hidden, *rest = frame.tensors
            frame = replace(frame, tensors=(*encode(hidden, self._codec), *rest), codec=self._codec)
        elif frame.kind is FrameKind.GRADIENT:
            (gradient,) = frame.tensors
            if self._feedback is None:
                coded = encode(gradient, self._codec)
            else:
                coded = self._feedback.encode(gradient, frame.microbatch)
            frame = replace(frame, tensors=coded, codec=self._codec)
        self._link.send(frame)

    def close(self) -> None:
        """Close the link, see `Link`."""
        self._link.close()
