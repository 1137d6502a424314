"""What the two sides of a link agree on beforehand, seen from one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from headway.stages.ids import Generation, StageIndex
from headway.stages.links.attachment import Attach
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, SIBLING_KINDS, UPSTREAM_KINDS, FrameContract
from headway.stages.links.link import FrameKind, Inbox
from headway.stages.links.receive_buffers import EmptyBytes, empty_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """Of one link of one generation, whatever kind of link it is."""

    job: str
    generation: Generation
    stage: StageIndex
    worker: int
    """Of this side: its stage, and its position among all workers of the plan."""
    peer_stage: StageIndex
    peer_worker: int
    peer_incarnation: str
    peer_node: str
    """The peer has to present the certificate of this node."""
    peer_name: str
    """For people: `stage 2`, or which replica of it."""
    peer_address: str
    """host:port of its link server. The side that accepts uses it for messages only."""
    inbox: Inbox
    contract: FrameContract
    first_contact: timedelta
    """How long the peer may take to come, or to answer the first time."""
    silence: timedelta
    """How long it may say nothing afterwards, before the link is lost."""
    attach: Attach | None = None
    """Links the devices of the two workers; None: all frames are in host memory."""
    launched_s: Callable[[], float] = float
    """Returns the most seconds for which this side's device may have work before it. Freeing its memory waits for that.
    """
    is_plain: bool = False
    """True if the site's network is private and the stream may do without TLS."""

    empty_bytes: EmptyBytes = empty_bytes
    """Allocates the payloads that arrive in host memory."""

    @property
    def peer(self) -> str:
        """For people, with its address."""
        return f"{self.peer_name} at {self.peer_address or 'an unknown address'}"

    @property
    def receives(self) -> frozenset[FrameKind]:
        """What the peer's stage says to this one."""
        if self.peer_stage == self.stage:
            return SIBLING_KINDS
        return DOWNSTREAM_KINDS if self.peer_stage < self.stage else UPSTREAM_KINDS
