"""The attachment of a stream: the way of values that are in a device's memory, by communicators of torch.distributed.

The stream carries everything else: headers, acknowledgements, signs of life, the end. A sender launches the transfer of
a frame and then announces the frame on the stream; a receiver launches its transfer at the announcement. So both sides
have one order, and no device waits for data that does not exist yet. Each direction has a communicator of its own: with
one for both, two sides that send at once would each wait for the other to receive.

An attachment lives as long as its stream. What fails here breaks the stream, and what breaks the stream aborts the
attachment; the next stream gets a new one, over which the unacknowledged frames come again. If the two sides cannot
form it, they agree on that, and the values travel over the stream, through both hosts.

Forming needs the device's memory and several exchanges. So where a link ends with nothing under way, either side keeps
the pair of directions for the next link between the two processes, which takes it up if both have kept the same one.

Python cannot end a thread that waits inside a communicator, so two threads do what may wait. They end when it is
aborted. If even that does not end them, `on_stuck` decides about the process.
"""

import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, Final, Protocol

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from headway.stages.links.frame_codec import Forms, Key, OutgoingFrame
from headway.stages.links.loop_thread import LoopThread

log = structlog.get_logger()

FORM_TIMEOUT: Final = timedelta(seconds=20)
"""Maximum time of each step of forming, once both sides are there."""
VERDICT_TIMEOUT: Final = 3 * FORM_TIMEOUT
"""The other side may need two steps before it can say whether its device is linked."""
ABORT_GRACE: Final = timedelta(seconds=5)
"""Time for an aborted attachment to end its threads, and to free its device, which first does all that was launched;
then `on_stuck` is called.
"""
MOST_TROUBLE: Final = 1000
"""Characters of a reason that is told to the other side."""
MOST_KEYS: Final = 64
NO_PAIR: Final = "none"
LEAST_BYTES_PER_S: Final = 10e6
"""Minimum rate of a payload, beyond the silence: a large frame on a slow network is no silence."""
FIRST_POLL_S, MOST_POLL_S = 0.00005, 0.001
"""Pause between two questions whether a transfer is done: short at first, and longer where it takes long."""


class SideStream(Protocol):
    """Where a device's transfers run, beside the computation."""

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which work enters this stream, on its device, in any thread."""
        ...

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return memory that this stream may write to at once, and that the computation may read later."""
        ...


class Transfer:
    """A tensor on its way. It is asked for, so that neither a peer nor a library holds the thread beyond the deadline.

    An aborted transfer of NCCL looks complete to CUDA, with any values: only `is_aborted` tells.
    """

    __slots__ = ("_end", "_late", "_work")

    def __init__(self, work: Any, end: "_End", late: str) -> None:
        """work: torch's handle of it, of which `is_completed` and `wait` are used. late: begins the error of a wait."""
        self._work = work
        self._end = end
        self._late = late

    def wait(self, timeout: timedelta) -> None:
        """Return when it is done. Raises RuntimeError when it does not get through, or not in time."""
        until, pause_s = monotonic() + timeout.total_seconds(), FIRST_POLL_S
        while not self._end.has_come_before(self._work.is_completed):
            if monotonic() >= until:
                raise RuntimeError(f"{self._late} for {timeout.total_seconds():.3g} s")
            sleep(pause_s)
            pause_s = min(1.25 * pause_s, MOST_POLL_S)
        self._raise_if_aborted()
        self._work.wait(timeout)
        self._raise_if_aborted()  # an abort between the two completes the transfer too

    def _raise_if_aborted(self) -> None:
        if self._end.has_come:
            raise RuntimeError("the attachment was aborted")


class _End:
    """Of a direction, by its abort. NCCL's communicator is locked during an abort, and torch waits for that lock with
    the interpreter's own held: so nothing may be asked from then on.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._lock = threading.Lock()

    def come(self) -> None:
        """Let it come, once the question under way is answered."""
        with self._lock:
            self.has_come = True

    def has_come_before(self, is_completed: Callable[[], bool]) -> bool:
        """Return True once it has come; until then, what is asked."""
        with self._lock:
            return self.has_come or is_completed()


class Direction:
    """One direction between two devices. One thread sends or receives; any thread may abort."""

    def __init__(self, communicator: Any, stream: SideStream, *, peer: int) -> None:
        """communicator: a ProcessGroup of torch.distributed, of which `send`, `recv` and `abort` are used. Its `abort`
        may take long, or never return.
        """
        self._communicator = communicator
        self._stream = stream
        self._peer = peer
        self._end = _End()

    def send(self, tensor: Tensor) -> Transfer:
        """Begin to send a contiguous tensor that is computed. It must live until the peer has it."""
        with self._stream.entered():
            work = self._communicator.send([tensor], self._peer, 0)
        return Transfer(work, self._end, f"the peer's device took nothing of {tensor.nbytes} bytes")

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Transfer]:
        """Begin to receive into new memory of the device."""
        with self._stream.entered():
            tensor = self._stream.empty(dtype, shape)
            work = self._communicator.recv([tensor], self._peer, 0)
        return tensor, Transfer(work, self._end, f"the peer's device sent nothing of {tensor.nbytes} bytes")

    def greet(self, *, is_sender: bool, timeout: timedelta = FORM_TIMEOUT) -> None:
        """Transfer one number, so that all that is set up at first use is there before the first frame.

        Raises RuntimeError; then the direction is aborted.
        """
        try:
            if is_sender:
                with self._stream.entered():
                    tensor = self._stream.empty(torch.float32, (1,))
                transfer = self.send(tensor)
            else:
                tensor, transfer = self.receive(torch.float32, (1,))
            transfer.wait(timeout)
        except RuntimeError:
            abort_aside(self)
            raise

    def abort(self) -> None:
        """Fail every waiting transfer at once, then free the device of them. May take long, or never return."""
        self._end.come()  # first: what follows may never return
        self._communicator.abort()


@dataclass(frozen=True, slots=True)
class KeptPair:
    """Both directions between two workers, with nothing under way."""

    name: str
    """Both sides have the same one, and no other pair has it."""
    sending: Direction
    receiving: Direction

    def abort(self) -> list[threading.Thread]:
        """Abort both at once, in threads, which are returned."""
        return [abort_aside(self.sending), abort_aside(self.receiving)]


class KeptPairs:
    """The pairs of a worker that no link has now, by the incarnation of the other worker. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: dict[str, KeptPair] = {}
        self._wanted: frozenset[str] | None = None

    def keep(self, other: str, pair: KeptPair) -> bool:
        """Keep a pair, in place of an older one; return whether anybody wants it."""
        with self._lock:
            if self._wanted is not None and other not in self._wanted:
                return False
            older, self._pairs[other] = self._pairs.get(other), pair
        if older is not None:
            older.abort()
        return True

    def take(self, other: str) -> KeptPair | None:
        """Return the pair with another worker, which is the caller's from now on."""
        with self._lock:
            return self._pairs.pop(other, None)

    def want_only(self, others: Iterable[str]) -> None:
        """Keep pairs with these workers from now on, and abort all others: they hold memory of the device."""
        with self._lock:
            self._wanted = frozenset(others)
            ended = [self._pairs.pop(other) for other in self._pairs.keys() - self._wanted]
        for pair in ended:
            pair.abort()


def abort_aside(what: Any) -> threading.Thread:
    """Abort a communicator or a direction in a thread, which is returned.

    A communicator that nobody aborts is aborted where its last reference goes, and holds the interpreter's lock
    meanwhile.
    """
    thread = threading.Thread(target=what.abort, name="headway-abort", daemon=True)
    thread.start()
    return thread


class Attach(Protocol):
    """How the devices of a link's two workers come to talk directly."""

    @property
    def card(self) -> str:
        """Return the device's name, which no other one in the world has."""
        ...

    def side_stream(self) -> SideStream:
        """Return a stream for what goes through the hosts."""
        ...

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        ...

    @property
    def kept(self) -> KeptPairs:
        """Return the pairs that this worker's earlier links have left."""
        ...

    def open(self, store: Store, *, rank: int, sender: int) -> Direction:
        """Open the direction from the rank `sender`. Both ranks call it at the same time. Raises RuntimeError."""
        ...

    def on_stuck(self, peer: str) -> None:
        """Be told, in the loop's thread, that a peer's attachment does not end."""
        ...


class LinkStore(Store):
    """The keys by which torch.distributed finds the other end: what one side writes, the link tells the other."""

    def __init__(self, tell: Callable[[Key], None]) -> None:
        super().__init__()
        self._tell = tell
        # All threads, under the condition's lock:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._is_closed = False

    def hear(self, key: Key) -> None:
        """Take what the other side wrote. Raises OverflowError beyond MOST_KEYS."""
        with self._changed:
            if len(self._values) >= MOST_KEYS:
                raise OverflowError(f"more than {MOST_KEYS} keys of an attachment")
            self._values[key.name] = key.value
            self._changed.notify_all()

    def close(self) -> None:
        """Fail whoever waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Write a key."""
        written = Key(key, value if isinstance(value, bytes) else str(value).encode())
        self.hear(written)
        self._tell(written)

    def add(self, key: str, amount: int) -> int:
        """Add to a number of this side, and return the sum."""
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, number)
        return number

    def get(self, key: str) -> bytes:
        """Read a key, once it is there. Raises RuntimeError when it is not in time."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Any, timeout: timedelta = FORM_TIMEOUT) -> None:
        """Wait until all keys are there. Raises RuntimeError when they are not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has(keys), timeout.total_seconds())
            if not self._has(keys):
                what = "is gone" if self._is_closed else f"has not written {keys} within {timeout.total_seconds():g} s"
                raise RuntimeError(f"the other side {what}")

    def check(self, keys: Any) -> bool:
        """Return whether all keys are there."""
        with self._changed:
            return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class Attachment:
    """Of one stream of a link. Its methods belong to the loop's thread, except where they say otherwise."""

    def __init__(
        self,
        loop: LoopThread,
        attach: Attach,
        *,
        peer: str,
        other: str,
        rank: int,
        silence: timedelta,
        launched_s: Callable[[], float],
        tell: Callable[[Key], None],
        on_ready: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """other: the peer's incarnation. rank: 0 or 1, the other one at the other end. launched_s: see `LinkTerms`.

        tell: says a key to the other side. on_ready: is called when more can be written. on_failure: is called with a
        reason, when the stream has to end.
        """
        self.is_decided = False
        """Whether the two sides know if they talk directly."""
        self._loop = loop
        self._attach = attach
        self._peer = peer
        self._other = other
        self._rank = rank
        self._silence = silence
        self._launched_s = launched_s
        self._tell = tell
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._store = LinkStore(lambda key: loop.call_soon(self._tell_unless_aborted, key))
        self._to_send: SimpleQueue[OutgoingFrame | None] = SimpleQueue()
        self._to_receive: SimpleQueue[tuple[Forms, Callable[[tuple[Tensor, ...]], None]] | None] = SimpleQueue()
        self._under_way: deque[tuple[Callable[..., None], list[Tensor], list[Transfer]]] = deque()
        """What arrives. Aborted transfers may still write, so it is held as long as an abort holds this object."""
        self._threads: list[threading.Thread] = []
        # All threads, under the lock:
        self._lock = threading.Lock()
        self._is_aborted = False
        self._directions: dict[int, Direction] = {}
        """By the rank that sends. Empty where the values go through the hosts."""
        self._pair_name = ""
        self._start(self._receive_all, "receive")

    @property
    def is_ended(self) -> bool:
        """Return whether no thread of it runs any more, and its device is free."""
        return not any(thread.is_alive() for thread in self._threads)

    def hear(self, key: Key) -> None:
        """Take what the other side says for the forming. Raises OverflowError."""
        self._store.hear(key)

    def send(self, outgoing: OutgoingFrame) -> None:
        """Begin to send a frame's values. `on_ready` follows, and then `outgoing` may be written."""
        outgoing.begun_by = self
        self._to_send.put(outgoing)

    def receive(self, forms: Forms, on_arrived: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Begin to receive the tensors of a frame. `on_arrived` is called with them, frame by frame in order."""
        self._to_receive.put((forms, on_arrived))

    def abort(self, *, keeps_pair: bool = False) -> None:
        """End everything, now. Returns at once; `is_ended` tells when the device is free.

        keeps_pair: nothing that this side sent or heard of is under way, and the next link may go on with the pair.
        """
        with self._lock:
            self._is_aborted = True
            directions = list(self._directions.values())
        if keeps_pair and self.is_decided and directions:
            pair = KeptPair(self._pair_name, self._directions[self._rank], self._directions[1 - self._rank])
            if self._attach.kept.keep(self._other, pair):
                directions = []
        self._store.close()
        self._to_send.put(None)
        self._to_receive.put(None)
        # Both at once: the abort of one may wait for the other's transfers.
        for direction in directions:
            self._start(partial(self._abort, direction), "abort")
        grace = ABORT_GRACE if self.is_decided else ABORT_GRACE + 2 * FORM_TIMEOUT
        self._loop.loop.call_later(grace.total_seconds() + self._launched_s(), self._tell_if_stuck)

    def _abort(self, direction: Direction) -> None:
        direction.abort()

    def _tell_if_stuck(self) -> None:
        if not self.is_ended:
            self._attach.on_stuck(self._peer)

    def _tell_unless_aborted(self, key: Key) -> None:
        if not self._is_aborted:
            self._tell(key)

    def _decide(self) -> None:
        self.is_decided = True
        self._start(self._send_all, "send")
        if not self._is_aborted:
            self._on_ready()

    def _begun(self, outgoing: OutgoingFrame, transfers: Sequence[Transfer], on_host: Sequence[Tensor] | None) -> None:
        if self._is_aborted:
            return
        if on_host is not None:
            outgoing.carry(on_host)
        outgoing.sent_by, outgoing.transfers = self, transfers
        self._on_ready()

    def _arrived(self, on_arrived: Callable[[tuple[Tensor, ...]], None], tensors: tuple[Tensor, ...]) -> None:
        if not self._is_aborted:
            on_arrived(tensors)

    def _fail(self, reason: str) -> None:
        if not self._is_aborted:
            self._on_failure(reason)

    # --- the attachment's threads -----------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._told, args=(work,), name=f"headway-{name} {self._peer}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _told(self, work: Callable[[], None]) -> None:
        """Do a thread's work. Its error ends the stream, and one that nobody expects is also one of the loop."""
        try:
            work()
        except RuntimeError as error:
            self._loop.call_soon(self._fail, plain(error))
        except Exception as error:
            self._loop.call_soon(self._fail, plain(error))
            self._loop.call_soon(_raise, error)

    def _receive_all(self) -> None:
        self._form()
        while True:
            while not self._under_way or not self._to_receive.empty():
                awaited = self._to_receive.get()
                if awaited is None:
                    return
                self._begin_to_receive(*awaited)
            on_arrived, tensors, transfers = self._under_way[0]
            patience = payload_patience(self._silence, sum(tensor.nbytes for tensor in tensors))
            for transfer in transfers:
                transfer.wait(patience)
            self._under_way.popleft()
            self._loop.call_soon(self._arrived, on_arrived, tuple(tensors))

    def _begin_to_receive(self, forms: Forms, on_arrived: Callable[..., None]) -> None:
        direction = self._directions.get(1 - self._rank)
        if direction is None:
            raise RuntimeError("a frame between devices that are not linked")
        tensors: list[Tensor] = []
        transfers: list[Transfer] = []
        self._under_way.append((on_arrived, tensors, transfers))
        for dtype, shape in forms:
            if 0 in shape:
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            tensor, transfer = direction.receive(dtype, shape)
            tensors.append(tensor)
            transfers.append(transfer)

    def _send_all(self) -> None:
        beside = self._attach.side_stream()
        while (outgoing := self._to_send.get()) is not None:
            direction = self._directions.get(self._rank)
            if direction is None:
                # The values are computed. In a thread's usual stream their copy would wait for all that is launched.
                with beside.entered():
                    on_host = [tensor.cpu() for tensor in outgoing.tensors]
                self._loop.call_soon(self._begun, outgoing, (), on_host)
            else:
                transfers = [direction.send(tensor) for tensor in outgoing.tensors if tensor.numel()]
                self._loop.call_soon(self._begun, outgoing, transfers, None)

    def _form(self) -> None:
        """Open both directions, or agree with the other side that there is none. Raises RuntimeError."""
        if self._is_one_card():
            log.warning("cards_not_linked", peer=self._peer, reason="both workers are on one card")
        elif not self._take_up():
            self._open_both()
        self._loop.call_soon(self._decide)

    def _is_one_card(self) -> bool:
        """Return whether both workers are on one card: NCCL refuses that, and may hang when it is aborted then."""
        own, other = (f"card-{rank}" for rank in (self._rank, 1 - self._rank))
        self._store.set(own, f"is {self._attach.card}")
        return self._store.get(other) == self._store.get(own)

    def _take_up(self) -> bool:
        """Go on with the pair of an earlier link, if both sides have kept it; return whether they have.

        No greeting: what both have acknowledged has left nothing in it.
        """
        pair = self._attach.kept.take(self._other)
        own, other = (f"pair-{rank}" for rank in (self._rank, 1 - self._rank))
        name, fresh = pair.name if pair else NO_PAIR, secrets.token_hex(8)
        try:
            self._store.set(own, f"{name} {fresh}")
            told, _, others_fresh = self._store.get(other).decode(errors="replace").partition(" ")
            self._pair_name = name if told == name != NO_PAIR else "-".join(sorted((fresh, others_fresh)))
            with self._lock:
                if pair is None or told != name or self._is_aborted:
                    return False
                self._directions = {self._rank: pair.sending, 1 - self._rank: pair.receiving}
                pair = None
        finally:
            if pair is not None:
                self._threads += pair.abort()
        return True

    def _open_both(self) -> None:
        for sender in (0, 1):
            trouble = ""
            try:
                self._open(sender)
            except RuntimeError as error:
                trouble = str(error)[:MOST_TROUBLE] or "unknown"
            own, other = (f"verdict-{sender}-{rank}" for rank in (self._rank, 1 - self._rank))
            self._store.set(own, f"said: {trouble}")
            self._store.wait([other], VERDICT_TIMEOUT)
            trouble = trouble or self._store.get(other).decode(errors="replace").removeprefix("said: ")
            if trouble:
                log.warning("cards_not_linked", peer=self._peer, reason=plain(RuntimeError(trouble)))
                with self._lock:
                    directions, self._directions = self._directions, {}
                self._threads += [abort_aside(direction) for direction in directions.values()]
                break

    def _open(self, sender: int) -> None:
        direction = self._attach.open(self._store, rank=self._rank, sender=sender)
        with self._lock:
            is_wanted = not self._is_aborted
            if is_wanted:
                self._directions[sender] = direction
        if not is_wanted:
            self._threads.append(abort_aside(direction))
            raise RuntimeError("the attachment was aborted")


def payload_patience(silence: timedelta, num_bytes: int) -> timedelta:
    """Return the maximum time for a transfer of these bytes."""
    return silence + timedelta(seconds=num_bytes / LEAST_BYTES_PER_S)


def plain(error: Exception) -> str:
    """Return the sentence inside an error of torch.distributed, without its source lines and advice."""
    text = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).strip())
    return " ".join(re.split(r"\. (?=[A-Z])|\n", text)[0].split())


def _raise(error: Exception) -> None:
    raise error
