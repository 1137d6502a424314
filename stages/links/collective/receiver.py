"""The receiving half of a collective link: transfers that begin before their data is on its way.

gloo sends nothing before the other side has named the target memory. So some messages are always awaited. While one
payload arrives, the next is awaited too, as soon as its header is there. So a sender with several frames never waits
for a receiver.

A payload is never awaited before its header: memory is taken only for data on its way.
"""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.stages.links.collective.group import GroupOfTwo, Transfer
from headway.stages.links.collective.header import Announcement, HeaderReader, Route
from headway.stages.links.collective.message import header_of, max_message_bytes, unpack
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame
from headway.stages.links.receive_buffers import empty_tensor

NUM_MESSAGES = 4
"""Number of messages that are awaited at any time."""

NUM_AHEAD = 1
"""Frames with header and memory, after the one that arrives."""

LEAST_BYTES_PER_S = 10e6
"""Minimum rate of a payload, beyond the silence: a large frame on a slow network is no silence."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A message on its way."""

    buffer: Tensor
    words: Any
    """Header of the message, a numpy array of its memory."""
    transfer: Transfer

    @property
    def has_begun(self) -> bool:
        """Return whether any part has arrived: gloo's transfer does not tell without waiting."""
        return bool(self.words[0])


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A frame whose tensors are there when the transfers are done."""

    announcement: Announcement
    tensors: tuple[Tensor, ...]
    transfers: tuple[Transfer, ...] = ()


class FrameReceiver:
    """The frames of one direction, in the peer's order."""

    def __init__(self, group: GroupOfTwo, reader: HeaderReader, contract: FrameContract, *, silence: timedelta) -> None:
        """silence: maximum wait for the next message."""
        self._group = group
        self._reader = reader
        self._silence = silence
        self._message_bytes = max_message_bytes(contract)
        self._messages = deque(self._await_message() for _ in range(NUM_MESSAGES))
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
        while self._may_look_ahead() and self._messages[0].has_begun:
            self._read_message()
        frame = self._arriving.popleft()
        patience = payload_patience(self._silence, sum(tensor.nbytes for tensor in frame.tensors))
        for transfer in frame.transfers:
            transfer.wait(patience)
        return frame.announcement.frame(frame.tensors)

    def _may_look_ahead(self) -> bool:
        """Return whether to read ahead while a payload arrives: a complete frame must not wait for later ones."""
        return bool(self._arriving[0].transfers) and len(self._arriving) <= NUM_AHEAD and not self._reader.is_ended

    def _read_message(self) -> None:
        """Wait for the next message, and begin to receive the frame that it announces."""
        message = self._messages.popleft()
        message.transfer.wait(self._silence)
        announcement, is_part = self._reader.read(header_of(message.buffer)), False
        if announcement is not None and announcement.route is Route.INLINE:
            tensors, is_part = unpack(message.buffer, announcement.tensors)
            self._arriving.append(_Arriving(announcement, tensors))
        elif announcement is not None:
            self._arriving.append(self._await_payload(announcement))
        self._messages.append(self._await_message(None if is_part else message.buffer))

    def _await_message(self, buffer: Tensor | None = None) -> _Message:
        if buffer is None:
            buffer = empty_tensor(torch.uint8, (self._message_bytes,))
        words = header_of(buffer).numpy()
        words[0] = 0
        return _Message(buffer, words, self._group.receive_message(buffer))

    def _await_payload(self, announcement: Announcement) -> _Arriving:
        tensors, transfers = [], []
        for dtype, shape in announcement.tensors:
            if prod(shape) == 0:
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            tensor, transfer = self._group.receive(dtype, shape, is_on_device=announcement.route is Route.DEVICE)
            tensors.append(tensor)
            transfers.append(transfer)
        return _Arriving(announcement, tuple(tensors), tuple(transfers))


def payload_patience(silence: timedelta, num_bytes: int) -> timedelta:
    """Return the maximum time for a transfer of these bytes."""
    return silence + timedelta(seconds=num_bytes / LEAST_BYTES_PER_S)
