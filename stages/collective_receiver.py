"""The receiving half of a collective link: transfers that are begun before anything is there to receive.

gloo sends nothing before the other side has said where it may go. So some messages are always awaited, and of the kind
that keeps coming, the hidden states of one direction, the payloads of the next frames too: a sender never waits for a
receiver that still looks at the header before.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
from torch import Tensor

from headway.stages.collective_group import GroupOfTwo, Transfer
from headway.stages.collective_header import Announcement, HeaderReader, Route
from headway.stages.collective_message import header_of, max_message_bytes, unpack
from headway.stages.frame_contract import FrameContract
from headway.stages.link import Frame, FrameKind

NUM_MESSAGES = 4
"""Messages that are awaited at any time."""

NUM_PAYLOADS = 2
"""Payloads that are awaited before they are announced, and memory that is taken for them."""

LEAST_BYTES_PER_S = 10e6
"""A payload may take as long as at this rate beyond the silence: a large frame on a slow network is no silence."""

_KEEP_COMING = frozenset({FrameKind.ACTIVATION, FrameKind.GRADIENT})


@dataclass(frozen=True, slots=True)
class _Payload:
    """A frame's tensors on their way."""

    tensors: tuple[Tensor, ...]
    transfers: tuple[Transfer, ...]


class FrameReceiver:
    """Frames of one direction, in the peer's order."""

    def __init__(self, group: GroupOfTwo, reader: HeaderReader, contract: FrameContract, *, silence: timedelta) -> None:
        """silence: how long the next message may take."""
        self._group = group
        self._reader = reader
        self._silence = silence
        self._kept_coming = frozenset(
            kind for kind in _KEEP_COMING if not any(form.may_be_shorter for form in contract.forms.get(kind, ()))
        )
        self._message_bytes = max_message_bytes(contract)
        self._messages = deque(self._await_message() for _ in range(NUM_MESSAGES))
        self._payloads: defaultdict[FrameKind, deque[_Payload]] = defaultdict(deque)

    def receive(self) -> Frame | None:
        """The next frame; None for a message without one. Raises RuntimeError when the group breaks, ProtocolError."""
        message, transfer = self._messages.popleft()
        transfer.wait(self._silence)
        announcement = self._reader.read(header_of(message))
        if announcement is None:
            self._messages.append(self._await_message(message))
            return None
        if announcement.route is Route.INLINE:
            tensors, is_part = unpack(message, announcement.tensors)
            self._messages.append(self._await_message(None if is_part else message))
            return announcement.frame(tensors)
        self._messages.append(self._await_message(message))
        payload = self._next_payload(announcement)
        patience = payload_patience(self._silence, sum(tensor.nbytes for tensor in payload.tensors))
        for transfer in payload.transfers:
            transfer.wait(patience)
        return announcement.frame(payload.tensors)

    def _await_message(self, buffer: Tensor | None = None) -> tuple[Tensor, Transfer]:
        if buffer is None:
            buffer = torch.empty(self._message_bytes, dtype=torch.uint8)
        return buffer, self._group.receive_message(buffer)

    def _next_payload(self, announcement: Announcement) -> _Payload:
        if announcement.route is Route.DEVICE or announcement.kind not in self._kept_coming:
            return self._await_payload(announcement)
        awaited = self._payloads[announcement.kind]
        while len(awaited) <= NUM_PAYLOADS:
            awaited.append(self._await_payload(announcement))
        return awaited.popleft()

    def _await_payload(self, announcement: Announcement) -> _Payload:
        """Begin to receive what is announced, or what is of the same form and will be."""
        tensors, transfers = [], []
        for dtype, shape in announcement.tensors:
            if prod(shape) == 0:
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            tensor, transfer = self._group.receive(
                dtype, shape, announcement.kind, is_on_device=announcement.route is Route.DEVICE
            )
            tensors.append(tensor)
            transfers.append(transfer)
        return _Payload(tuple(tensors), tuple(transfers))


def payload_patience(silence: timedelta, num_bytes: int) -> timedelta:
    """How long a transfer of so many bytes may take."""
    return silence + timedelta(seconds=num_bytes / LEAST_BYTES_PER_S)
