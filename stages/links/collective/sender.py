"""The sending half of a collective link: what the group is sending, and which frames travel together.

A frame that is sent at once goes alone. Small frames that had to wait go together in one message.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic

from torch import Tensor

from headway.stages.ids import Generation
from headway.stages.links.collective.group import DeviceTransfer, GroupOfTwo, Transfer
from headway.stages.links.collective.header import Route, Signal, announce, is_inline, signal
from headway.stages.links.collective.message import HEADER_BYTES, MAX_TOGETHER, Message, frame_bytes, max_message_bytes
from headway.stages.links.collective.receiver import payload_patience
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame

MAX_UNDER_WAY = 4
"""Messages that are handed to the group at once, so that the next one does not wait."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """The data that the group is sending; it must not be freed before."""

    message: Message
    transfers: tuple[Transfer, ...]
    by_device: tuple[DeviceTransfer, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    num_bytes: int = 0


class FrameSender:
    """The frames of one direction, in the order of the calls, in one thread."""

    def __init__(
        self,
        group: GroupOfTwo,
        contract: FrameContract,
        *,
        generation: Generation,
        silence: timedelta,
        heartbeat: timedelta,
    ) -> None:
        """silence: time that the peer has to take a message. heartbeat: time after which it is told that we live."""
        self._group = group
        self._forms = contract.sent_forms or contract.forms
        self._generation = generation
        self._silence = silence
        self._heartbeat_s = heartbeat.total_seconds()
        self._last_beat = 0.0
        self._message_bytes = max_message_bytes(contract)
        self._free: list[Message] = []
        self._under_way: deque[_UnderWay] = deque()
        self._sequence = 0

    @property
    def is_idle(self) -> bool:
        """Return whether the peer has taken everything."""
        return not self._under_way

    @property
    def is_full(self) -> bool:
        """Return whether `finish` has to be called before anything is sent."""
        return len(self._under_way) >= MAX_UNDER_WAY

    def num_together(self, frames: Iterable[Frame]) -> int:
        """Return how many of these frames, from the first on, go in one message; at least one."""
        number, room = 0, self._message_bytes
        for frame in frames:
            if number == MAX_TOGETHER or self._route(frame) is not Route.INLINE:
                break
            room -= frame_bytes(tensor.nbytes for tensor in frame.tensors)
            if room < 0:
                break
            number += 1
        return max(1, number)

    def send(self, frames: Sequence[Frame]) -> None:
        """Begin to send frames that go together. Raises RuntimeError."""
        route = self._route(frames[0])
        tensors = [[tensor.detach() for tensor in frame.tensors] for frame in frames]
        headers = [announce(frame, sequence=self._sequence + k, route=route) for k, frame in enumerate(frames)]
        self._sequence += len(frames)
        num_bytes = sum([tensor.nbytes for each in tensors for tensor in each])
        payload = [] if route is Route.INLINE else [tensor for tensor in tensors[0] if tensor.numel()]
        message = self._free.pop() if self._free else Message(self._message_bytes)
        inline = tensors if route is Route.INLINE else [()]
        told = self._group.send_message(message.write(list(zip(headers, inline, strict=True))))
        by_device: list[DeviceTransfer] = []
        by_host: list[Transfer] = []
        if route is Route.DEVICE:
            by_device = [self._group.send_by_device(tensor) for tensor in payload]
        else:
            by_host = [self._group.send(tensor) for tensor in payload]
        sent = _UnderWay(message, (told, *by_host), tuple(by_device), tuple(payload), num_bytes)
        self._under_way.append(sent)

    def signal(self, kind: Signal) -> None:
        """Begin to send a header that stands alone. Raises RuntimeError."""
        message = Message(HEADER_BYTES)
        header = signal(kind, self._generation, sequence=self._sequence)
        self._under_way.append(_UnderWay(message, (self._group.send_message(message.write([(header, ())])),)))

    def finish(self) -> int:
        """Return the bytes of the oldest message's frames once the peer has taken them. Raises RuntimeError."""
        sent = self._under_way.popleft()
        patience = payload_patience(self._silence, sent.num_bytes)
        self._last_beat = monotonic()
        for by_device in sent.by_device:
            by_device.wait(patience, meanwhile=self._beat)
        for transfer in sent.transfers:
            transfer.wait(patience)
        if sent.num_bytes:
            self._free.append(sent.message)
        return sent.num_bytes

    def _beat(self) -> None:
        """Send a heartbeat if one is due. A peer's death ends no transfer between cards: only gloo tells of it."""
        if monotonic() - self._last_beat >= self._heartbeat_s:
            self._last_beat = monotonic()
            self.signal(Signal.HEARTBEAT)

    def _route(self, frame: Frame) -> Route:
        if all(self._group.goes_by_device(tensor) for tensor in frame.tensors):
            return Route.DEVICE
        return Route.INLINE if is_inline(self._forms[frame.kind]) else Route.HOST
