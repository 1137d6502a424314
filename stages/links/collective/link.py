"""The link over torch.distributed: one thread that sends, one that receives, a process group for each direction.

A header of fixed size precedes each payload, whose tensors are received into buffers of the contract's shapes. A broken
link is lost, never resumed. A peer that sends nothing for the silence, or takes nothing, is lost too; a large payload
has more time. A side without frames sends heartbeats.

A frame on a CUDA device is announced when it is computed: `send` only marks that moment in the compute stream. So the
receiver's device does not wait beside its own computation for data that does not exist yet.

Python cannot end a thread that waits inside the group. The thread ends by the goodbyes of both sides, or when the group
is aborted. If even that does not end it, or does not free the device, `on_stuck` is called, which decides about the
process.
"""

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import takewhile

import structlog

from headway.stages.device.device import StageDevice
from headway.stages.errors import LinkOverflowError, ProtocolError
from headway.stages.links.collective.group import DIRECTIONS, VERDICT_TIMES, GroupOfTwo
from headway.stages.links.collective.header import HeaderReader, Signal
from headway.stages.links.collective.nccl_settings import FORM_TIMEOUT
from headway.stages.links.collective.receiver import FrameReceiver
from headway.stages.links.collective.sender import FrameSender
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import HeldFrames

log = structlog.get_logger()

HEARTBEAT_EVERY = timedelta(seconds=1)
"""A side that sent nothing for this time, or for a quarter of the silence, sends a heartbeat."""

CLOSE_GRACE = timedelta(seconds=5)
"""Time for a closed link's last frames and the goodbyes; then its group is aborted."""

ABORT_GRACE = timedelta(seconds=5)
"""Time for the threads of an aborted group to notice, and for its device to be free; then `on_stuck` is called."""

FORM_GRACE = (4 + len(DIRECTIONS) * (2 + VERDICT_TIMES)) * FORM_TIMEOUT
"""Time for the forming of a group: the most that its steps may take together.

Gloo has four: a guard that opens, a group for each direction, a guard that closes. Each direction between cards has a
communicator, a greeting and a verdict.
"""


@dataclass(slots=True)
class _Outgoing:
    """A frame in the queue."""

    frame: Frame
    is_computed: bool


class CollectiveLink:
    """A `Link`. Frames wait, within the contract's bound, until `meet` has formed the group."""

    def __init__(
        self,
        loop: LoopThread,
        terms: LinkTerms,
        on_stuck: Callable[[str], None],
        *,
        device: StageDevice | None = None,
    ) -> None:
        """on_stuck: is called in the loop's thread. device: of frames that are not in host memory."""
        contract = terms.contract
        self._loop = loop
        self._peer = terms.peer
        self._generation = terms.generation
        self._inbox = terms.inbox
        self._contract = contract
        self._sent_forms = contract.sent_forms or contract.forms
        self._reader = HeaderReader(terms.peer, generation=terms.generation, contract=contract, kinds=terms.receives)
        self._held = HeldFrames(contract)
        self._max_bytes = contract.max_unacknowledged_bytes
        self._silence = terms.silence
        self._heartbeat = min(HEARTBEAT_EVERY, terms.silence / 4)
        self._device = device
        self._on_stuck = on_stuck
        # All threads, under the condition's lock:
        self._changed = threading.Condition()
        self._is_open = True
        self._is_broken = False
        self._queue: deque[_Outgoing] = deque()
        self._num_bytes = 0
        self._group: GroupOfTwo | None = None
        self._was_formed = False
        self._num_inside = 0
        self._threads: list[threading.Thread] = []
        self._releases: list[threading.Thread] = []
        """Threads that free the device of the group."""

    @property
    def peer(self) -> str:
        """Return `stage 2 at 10.0.0.7:4711`."""
        return self._peer

    @property
    def is_over(self) -> bool:
        """Return whether it is closed or lost."""
        return not self._is_open

    @property
    def was_connected(self) -> bool:
        """Return whether the two sides have found each other."""
        return bool(self._threads)

    @property
    def broken_at(self) -> None:
        """It does not resume: once its group is broken, it is lost."""
        return None

    @property
    def is_ended(self) -> bool:
        """Return whether no thread of it runs any more, and its device is free."""
        return not any(thread.is_alive() for thread in (*self._threads, *self._releases))

    def send(self, frame: Frame) -> None:
        """Send a frame, see `Link`. Raises LinkOverflowError beyond the contract's bound; after LinkLost the frame is
        dropped.

        The thread that computes calls it, with tensors whose computation is launched.
        """
        assert frame.generation == self._generation, "a frame of another generation"
        forms = self._sent_forms.get(frame.kind, ())
        fits = [form.fits(tensor.dtype, tensor.shape) for form, tensor in zip(forms, frame.tensors, strict=True)]
        assert fits, f"{frame.kind.name} is not sent over this link"
        assert all(fits), f"{frame.kind.name} is not of the contract's form"
        num_bytes, device = _num_bytes(frame), self._device
        # Here, so that the mark comes after a copy: the thread that sends has no place in the order of computation.
        frame = replace(frame, tensors=tuple(tensor.detach().contiguous() for tensor in frame.tensors))
        is_computed = device is None or all(device.is_on_host(tensor) for tensor in frame.tensors)
        outgoing = _Outgoing(frame, is_computed)
        with self._changed:
            if not self._is_open:
                return
            total = self._num_bytes + num_bytes
            if total > self._max_bytes:
                raise LinkOverflowError(self._peer, total, self._max_bytes)
            self._num_bytes = total
            self._queue.append(outgoing)
            self._changed.notify()
        if device is not None and not is_computed:
            device.after(device.mark(), partial(self._computed, outgoing))

    def close(self) -> None:
        """Close the link, see `Link`. Returns at once; sent frames are still delivered, within CLOSE_GRACE, if the
        sides had met.
        """
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._changed.notify()
        self._loop.call_soon(self._see_to_the_end)

    def lose(self, reason: str, *, was_unreached: bool = False) -> None:
        """Give the link up: LinkLost in the inbox, unless it is closed or lost already. From any thread."""
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._queue.clear()
            self._inbox.put(LinkLost(self._peer, reason, was_unreached))
            self._changed.notify()
        self._loop.call_soon(self._see_to_the_end)

    def meet(self, form: Callable[[], GroupOfTwo]) -> None:
        """Form the group, in a thread of the link, and begin. Call it once."""
        assert not self._threads
        self._start(self._receive_all, form, name="receive")

    def interrupt(self) -> None:
        """Break the group, if there is one: both sides lose the link."""
        with self._changed:
            group = self._group
        if group is not None:
            group.abort()

    # --- the end, in the loop's thread ------------------------------------------------------------------------------

    def _see_to_the_end(self) -> None:
        self._loop.loop.call_later(CLOSE_GRACE.total_seconds(), self._abort_what_is_left)

    def _abort_what_is_left(self) -> None:
        if self.is_ended:
            return
        with self._changed:
            is_forming = not self._was_formed
            self._is_broken = True
            self._changed.notify()
        self.interrupt()
        grace = FORM_GRACE if is_forming else ABORT_GRACE
        self._loop.loop.call_later(grace.total_seconds(), self._tell_if_stuck)

    def _tell_if_stuck(self) -> None:
        if not self.is_ended:
            self._on_stuck(self._peer)

    def _computed(self, outgoing: _Outgoing) -> None:
        """In a thread of the device."""
        with self._changed:
            outgoing.is_computed = True
            self._changed.notify()

    # --- the link's threads -----------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *arguments: object, name: str) -> None:
        run = partial(self._told, target, *arguments)
        thread = threading.Thread(target=run, name=f"headway-{name} {self._peer}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _told(self, target: Callable[..., None], *arguments: object) -> None:
        """Run a thread's work. An error that nobody expects loses the link, and is one of the loop."""
        try:
            target(*arguments)
        except Exception as error:
            self.lose(f"the link failed: {_plain(error)}")
            self.interrupt()
            self._loop.call_soon(_raise, error)

    def _break(self, group: GroupOfTwo, reason: str) -> None:
        """Mark the group as broken, so that the other thread notices too."""
        self.lose(reason)
        with self._changed:
            self._is_broken = True
            self._changed.notify()
        group.abort()

    def _receive_all(self, form: Callable[[], GroupOfTwo]) -> None:
        try:
            group = form()
        except (RuntimeError, OSError) as error:
            self.lose(f"the group was not formed: {_plain(error)}")
            return
        with self._changed:
            is_wanted = not self._is_broken
            if is_wanted:
                self._group, self._num_inside, self._was_formed = group, 2, True
        if not is_wanted:
            group.abort()
            self._releases = group.release()
            return
        if group.device_trouble:
            log.warning("cards_not_linked", peer=self._peer, reason=_plain(RuntimeError(group.device_trouble)))
        self._start(self._send_all, group, name="send")
        try:
            self._receive_frames(group)
        except ProtocolError as error:
            self._break(group, f"protocol violated: {error.reason}")
        except RuntimeError as error:
            self._break(group, _plain(error, silent=f"silent for {self._silence.total_seconds():g} s"))
        finally:
            self._leave()

    def _receive_frames(self, group: GroupOfTwo) -> None:
        """Receive until the peer's goodbye. Raises RuntimeError when the group breaks, ProtocolError."""
        receiver = FrameReceiver(group, self._reader, self._contract, silence=self._silence)
        while not receiver.is_ended:
            frame = receiver.receive()
            if frame is not None:
                self._take(frame)
        self.lose("the peer closed the link")

    def _take(self, frame: Frame) -> None:
        try:
            self._held.add(frame)
        except OverflowError as error:
            raise ProtocolError(self._peer, str(error)) from error
        with self._changed:
            if self._is_open:
                self._inbox.put(frame)

    def _send_all(self, group: GroupOfTwo) -> None:
        sender = FrameSender(
            group,
            self._contract,
            generation=self._generation,
            silence=self._silence,
            heartbeat=self._heartbeat,
        )
        try:
            is_ended = False
            while not (is_ended and sender.is_idle):
                item = None if is_ended else self._next_item(sender)
                if isinstance(item, Signal):
                    sender.signal(item)
                    is_ended = item is Signal.GOODBYE
                elif item is not None:
                    sender.send(item)
                if item is None or sender.is_full:
                    self._finish(sender)
        except RuntimeError as error:
            self._break(group, _plain(error, silent=f"took nothing for {self._silence.total_seconds():g} s"))
        finally:
            self._leave()

    def _next_item(self, sender: FrameSender) -> list[Frame] | Signal | None:
        """Return what to send next; None when only other work is left to finish. Raises RuntimeError."""
        with self._changed:
            is_ended = not self._is_open and not self._queue
            if sender.is_idle and not is_ended and not self._is_broken and not self._has_computed():
                self._changed.wait(self._heartbeat.total_seconds())
            if self._is_broken:
                raise RuntimeError("the group was aborted")
            if self._has_computed():
                computed = (each.frame for each in takewhile(lambda each: each.is_computed, self._queue))
                return [self._queue.popleft().frame for _ in range(sender.num_together(computed))]
            if not self._is_open and not self._queue:
                return Signal.GOODBYE
            return Signal.HEARTBEAT if sender.is_idle else None

    def _has_computed(self) -> bool:
        return bool(self._queue) and self._queue[0].is_computed

    def _finish(self, sender: FrameSender) -> None:
        num_bytes = sender.finish()
        with self._changed:
            self._num_bytes -= num_bytes

    def _leave(self) -> None:
        """Leave; the last of the two threads frees the group."""
        with self._changed:
            self._num_inside -= 1
            if not self._num_inside and self._group is not None:
                self._releases = self._group.release()
                self._group = None


def _raise(error: Exception) -> None:
    raise error


def _num_bytes(frame: Frame) -> int:
    return sum([tensor.nbytes for tensor in frame.tensors])


def _plain(error: Exception, *, silent: str = "") -> str:
    """Return the sentence inside an error of torch.distributed, without its source lines and advice."""
    text = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).strip())
    if silent and text.startswith("Timed out waiting"):
        return silent
    return " ".join(re.split(r"\. (?=[A-Z])|\n", text)[0].split())
