"""The receiving half of a collective link: transfers that begin before their data is on its way.

gloo sends nothing before the other side has named the target memory. So some messages are always awaited. While one
payload arrives, the next is awaited too, as soon as its header is there. So a sender with several frames never waits
for a receiver.

A payload is never awaited before its header: memory is taken only for data on its way.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
from torch import Tensor

from headway.stages.errors import ProtocolError
from headway.stages.links.collective.group import DeviceTransfer, GroupOfTwo, Transfer
from headway.stages.links.collective.header import Announcement, HeaderReader, Route
from headway.stages.links.collective.message import Message, frame_bytes, max_message_bytes, sizes_of
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame

NUM_MESSAGES = 4
"""Number of messages that are awaited at any time."""

NUM_AHEAD = 1
"""Frames with header and memory, after the one that arrives."""

LEAST_BYTES_PER_S = 10e6
"""Minimum rate of a payload, beyond the silence: a large frame on a slow network is no silence."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A frame whose tensors are there when the transfers are done."""

    announcement: Announcement
    tensors: tuple[Tensor, ...]
    transfers: tuple[Transfer | DeviceTransfer, ...] = ()


class FrameReceiver:
    """The frames of one direction, in the peer's order."""

    def __init__(self, group: GroupOfTwo, reader: HeaderReader, contract: FrameContract, *, silence: timedelta) -> None:
        """silence: maximum wait for the next message."""
        self._group = group
        self._reader = reader
        self._silence = silence
        self._message_bytes = max_message_bytes(contract)
        self._messages = deque(self._await_message(Message(self._message_bytes)) for _ in range(NUM_MESSAGES))
        self._arriving: deque[_Arriving] = deque()

    @property
    def is_ended(self) -> bool:
        """Return whether the peer said goodbye, and everything before has been received."""
        return self._reader.is_ended and not self._arriving

    def receive(self) -> Frame | None:
        """Return the next frame; None for a message without one. Raises RuntimeError when the group breaks,
        ProtocolError.
        """
        if not self._arriving:
            self._read_message()
        if not self._arriving:
            return None
        while self._may_look_ahead() and self._messages[0][0].has_begun:
            self._read_message()
        frame = self._arriving.popleft()
        if frame.transfers:
            patience = payload_patience(self._silence, sum(tensor.nbytes for tensor in frame.tensors))
            for transfer in frame.transfers:
                transfer.wait(patience)
        return frame.announcement.frame(frame.tensors)

    def _may_look_ahead(self) -> bool:
        """Return whether to read ahead while a payload arrives: a complete frame must not wait for later ones."""
        return bool(self._arriving[0].transfers) and len(self._arriving) <= NUM_AHEAD and not self._reader.is_ended

    def _read_message(self) -> None:
        """Wait for the next message, and begin to receive the frames that it announces."""
        message, transfer = self._messages.popleft()
        transfer.wait(self._silence)
        inline, is_part = self._announced(message), False
        if inline:
            frames, is_part = message.read([announcement.tensors for announcement in inline])
            self._arriving += [_Arriving(*pair) for pair in zip(inline, frames, strict=True)]
        self._messages.append(self._await_message(Message(self._message_bytes) if is_part else message))

    def _announced(self, message: Message) -> list[Announcement]:
        """Return the frames that are in the message, or begin to receive the one that is not. Raises ProtocolError."""
        inline: list[Announcement] = []
        offset = 0
        while True:
            announcement = self._reader.read(message.header(offset))
            if announcement is None or announcement.route is not Route.INLINE:
                if inline:
                    raise self._error("something else among the frames of a message")
                if announcement is not None:
                    self._arriving.append(self._await_payload(announcement))
                return []
            sizes = sizes_of(announcement.tensors)
            has_room = message.has_room(offset, sizes)
            offset += frame_bytes(sizes)
            if not has_room or (announcement.is_followed and not message.has_room(offset)):
                raise self._error("frames that exceed their message")
            inline.append(announcement)
            if not announcement.is_followed:
                return inline

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self._reader.peer, reason)

    def _await_message(self, message: Message) -> tuple[Message, Transfer]:
        message.clear()
        return message, self._group.receive_message(message.tensor)

    def _await_payload(self, announcement: Announcement) -> _Arriving:
        receive: Callable[[torch.dtype, tuple[int, ...]], tuple[Tensor, Transfer | DeviceTransfer]]
        receive = self._group.receive_by_device if announcement.route is Route.DEVICE else self._group.receive
        tensors, transfers = [], []
        for dtype, shape in announcement.tensors:
            if prod(shape) == 0:
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            tensor, transfer = receive(dtype, shape)
            tensors.append(tensor)
            transfers.append(transfer)
        return _Arriving(announcement, tuple(tensors), tuple(transfers))


def payload_patience(silence: timedelta, num_bytes: int) -> timedelta:
    """Return the maximum time for a transfer of these bytes."""
    return silence + timedelta(seconds=num_bytes / LEAST_BYTES_PER_S)
