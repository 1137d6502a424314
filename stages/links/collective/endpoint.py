"""Opens collective links: the two sides meet over the gRPC server of the links, with mTLS. Over it they also exchange
the keys that torch.distributed asks for.

The hello is that of every link: it names protocol, job, generation and both processes. One that is too early is
answered `not yet` and repeated. One that is too late, or for another process, is answered with the reason.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
import structlog
import torch
from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.ids import Generation, StageIndex
from headway.stages.links.collective.group import ACCEPTOR, DIALLER, GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.link import CollectiveLink
from headway.stages.links.collective.rendezvous import KEYS_METHOD, KeysClient, LinkKeys, PeerStore, answer_keys
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.known_generations import KnownGenerations
from headway.stages.links.link import FrameKind, Inbox
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.own_sockets import grpc_address
from headway.stages.sockets.tls_identity import TlsIdentity, expecting, is_borne, names_of_client, other_node

log = structlog.get_logger()

METHOD = "Meet"
CALL_TIMEOUT = timedelta(seconds=10)
FORM_TIMEOUT = timedelta(seconds=20)
"""Maximum time of each step of forming a group, once both sides know of each other."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTerms:
    """The terms of a link on which both sides agree beforehand, seen from one of them."""

    job: str
    generation: Generation
    stage: StageIndex
    worker: int
    """This side's stage, and its position among the plan's workers."""
    peer_stage: StageIndex
    peer_worker: int
    peer_incarnation: str
    peer_node: str
    """Node whose certificate the peer has to present."""
    peer_name: str
    """Name for people: `stage 2`, or the replica of it."""
    peer_address: str
    """host:port of the peer's link server; of the dialling side it is only for messages."""
    inbox: Inbox
    contract: FrameContract
    receives: frozenset[FrameKind]
    device: torch.device
    first_contact: timedelta
    """Maximum time until the peer comes."""
    silence: timedelta
    """Maximum silence afterwards."""

    @property
    def peer(self) -> str:
        """Return the peer for people, with its address."""
        return f"{self.peer_name} at {self.peer_address or 'an unknown address'}"


@dataclass(slots=True)
class _Awaited:
    """A link that a neighbour is expected to dial."""

    terms: CollectiveTerms
    link: CollectiveLink
    keys: LinkKeys


class CollectiveEndpoint:
    """Opens links. `accept` and `dial` return at once, from any thread but the loop's; the links' server calls
    `methods`.
    """

    def __init__(
        self,
        *,
        loop: LoopThread,
        identity: TlsIdentity,
        host: str,
        incarnation: str,
        protocol: int,
        on_stuck: Callable[[str], None],
    ) -> None:
        """on_stuck: is called in the loop's thread with the name of a peer whose group does not end."""
        self._loop = loop
        self._identity = identity
        self._host = host
        self._incarnation = incarnation
        self._protocol = protocol
        self._on_stuck = on_stuck
        self._awaited: dict[tuple[str, str], _Awaited] = {}
        self._generations = KnownGenerations()
        self._links: list[CollectiveLink] = []

    @property
    def methods(self) -> dict[str, Callable[[bytes, Any], Awaitable[bytes]]]:
        """Return this endpoint's methods for the server of the links, by name."""
        return {METHOD: self._answer_meet, KEYS_METHOD: self._answer_keys}

    def accept(self, terms: CollectiveTerms, *, is_last: bool = True) -> CollectiveLink:
        """Return the link to a neighbour that dials. LinkLost arrives if it has not within `first_contact`.

        is_last: no other `accept` of this generation follows; until then a dialler is told to come again.
        """
        awaited = _Awaited(terms, self._new_link(terms), LinkKeys())
        self._loop.call_soon(self._await, awaited, is_last)
        return awaited.link

    def dial(self, terms: CollectiveTerms) -> CollectiveLink:
        """Return the link to a neighbour that accepts. LinkLost arrives if it has not within `first_contact`, or
        refuses.
        """
        link = self._new_link(terms)
        self._loop.call_soon(self._begin, terms, link)
        self._loop.spawn(self._dial(terms, link), name=f"meet {terms.peer}")
        return link

    def cut(self) -> None:
        """Break all links, for tests. Callable from any thread."""
        self._loop.call_soon(self._cut)

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    def _new_link(self, terms: CollectiveTerms) -> CollectiveLink:
        return CollectiveLink(
            self._loop,
            terms.peer,
            generation=terms.generation,
            inbox=terms.inbox,
            contract=terms.contract,
            receives=terms.receives,
            silence=terms.silence,
            on_stuck=self._on_stuck,
        )

    def _begin(self, terms: CollectiveTerms, link: CollectiveLink, is_complete: bool = True) -> None:
        if is_complete:
            self._generations.meet(terms.job, terms.generation)
        self._links = [*(other for other in self._links if not other.is_over), link]
        self._awaited = {key: awaited for key, awaited in self._awaited.items() if not awaited.link.is_over}

    def _await(self, awaited: _Awaited, is_last: bool) -> None:
        terms = awaited.terms
        self._begin(terms, awaited.link, is_last)
        self._awaited[terms.job, terms.peer_incarnation] = awaited
        # The timer outlives most links: it must not hold the store.
        limit_s = terms.first_contact.total_seconds()
        self._loop.loop.call_later(limit_s, _lose_unless_met, awaited.link, f"did not dial within {limit_s:g} s")

    def _cut(self) -> None:
        for link in self._links:
            link.interrupt()

    async def _answer_meet(self, request: bytes, context: Any) -> bytes:
        """Answer Meet."""
        reply, awaited = self._judge(request, names_of_client(context.auth_context()))
        reply.incarnation = self._incarnation
        if awaited is not None:
            reply.store_prefix = awaited.keys.token
            if not awaited.link.was_met:
                terms = awaited.terms
                # The hello's origin, with the peer's certificate: a name might mean another address here.
                dialled_from = grpc_address(context.peer())
                peer_host = str(dialled_from[0]) if dialled_from else _host_of(terms.peer_address)
                meeting = Rendezvous(awaited.keys.store, self._host, peer_host, ACCEPTOR)
                awaited.link.meet(lambda: GroupOfTwo(meeting, terms.device, timeout=FORM_TIMEOUT))
        return reply.SerializeToString()

    async def _answer_keys(self, request: bytes, context: Any) -> bytes:
        """Answer Keys."""
        find = partial(self._keys_of, names_of_client(context.auth_context()))
        return await answer_keys(request, find, context)

    def _keys_of(self, names: tuple[str, ...], token: str) -> LinkKeys | None:
        """Return the keys of a link with a node of these names."""
        for awaited in self._awaited.values():
            is_meant = secrets.compare_digest(awaited.keys.token.encode(), token.encode())
            if is_meant and not awaited.link.is_over and is_borne(awaited.terms.peer_node, names):
                return awaited.keys
        return None

    def _judge(self, request: bytes, names: tuple[str, ...]) -> tuple[HelloReply, _Awaited | None]:
        try:
            hello = Hello.FromString(request)
        except DecodeError:
            return _refusal(HelloReply.WRONG_PROTOCOL, "the message is not a hello")
        if hello.protocol != self._protocol:
            return _refusal(HelloReply.WRONG_PROTOCOL, f"protocol {hello.protocol} instead of {self._protocol}")
        if hello.expected_incarnation != self._incarnation:
            return _refusal(HelloReply.WRONG_PEER, "another process listens here now")
        known = self._generations.newest(hello.job)
        if hello.generation > known:
            return _refusal(HelloReply.NOT_YET, f"generation {known} is the newest here")
        if hello.generation < known:
            return _refusal(HelloReply.STALE, f"generation {known} is in force here")
        awaited = self._awaited.get((hello.job, hello.incarnation))
        if awaited is None or (hello.stage, hello.worker) != (awaited.terms.peer_stage, awaited.terms.peer_worker):
            reason = f"no collective link is expected from stage {hello.stage} of process {hello.incarnation}"
            return _refusal(HelloReply.WRONG_PEER, reason)
        if not is_borne(awaited.terms.peer_node, names):
            log.warning("hello_of_another_node", peer=awaited.terms.peer, node=awaited.terms.peer_node, names=names)
            return _refusal(HelloReply.WRONG_PEER, other_node(awaited.terms.peer_node, names))
        if awaited.terms.generation != known or awaited.link.is_over:
            return _refusal(HelloReply.STALE, f"the link of generation {awaited.terms.generation} is over here")
        return HelloReply(verdict=HelloReply.ACCEPTED), awaited

    async def _dial(self, terms: CollectiveTerms, link: CollectiveLink) -> None:
        """Ask until the peer accepts, refuses for good, or has taken too long."""
        give_up_at = self._loop.loop.time() + terms.first_contact.total_seconds()
        reason, pause_s = "no answer", FIRST_PAUSE_S
        while not link.is_over:
            left_s = give_up_at - self._loop.loop.time()
            if left_s <= 0:
                what = f"not connected within {terms.first_contact.total_seconds():g} s: {reason}"
                return link.lose(what, was_unreached=True)
            try:
                reply = await self._ask(terms, timeout_s=min(CALL_TIMEOUT.total_seconds(), left_s))
            except ConnectionError as error:
                reason = str(error)
            else:
                if reply.verdict == HelloReply.ACCEPTED:
                    return link.meet(partial(self._form, terms, reply))
                if reply.verdict != HelloReply.NOT_YET:
                    return link.lose(f"{HelloReply.Verdict.Name(reply.verdict)}: {reply.reason}")
                reason, give_up_at = reply.reason, self._loop.loop.time() + terms.first_contact.total_seconds()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return None

    async def _ask(self, terms: CollectiveTerms, *, timeout_s: float) -> HelloReply:
        """Ask over a new connection. Raises ConnectionError."""
        hello = Hello(
            protocol=self._protocol,
            job=terms.job,
            generation=terms.generation,
            incarnation=self._incarnation,
            expected_incarnation=terms.peer_incarnation,
            stage=terms.stage,
            worker=terms.worker,
        )
        credentials = grpc.ssl_channel_credentials(self._identity.ca, self._identity.key, self._identity.certificate)
        options = (*expecting(terms.peer_node), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.secure_channel(terms.peer_address, credentials, options=options) as channel:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/headway.data.Link/{METHOD}")
            try:
                return HelloReply.FromString(await method(hello.SerializeToString(), timeout=timeout_s))
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
            except DecodeError as error:
                raise ConnectionError("an undecodable answer to the hello") from error

    def _form(self, terms: CollectiveTerms, reply: HelloReply) -> GroupOfTwo:
        """Form the group, in a thread of the link."""
        with KeysClient(self._loop, self._identity, terms.peer_address, node=terms.peer_node) as client:
            store = PeerStore(client, reply.store_prefix, timeout=FORM_TIMEOUT)
            meeting = Rendezvous(store, self._host, _host_of(terms.peer_address), DIALLER)
            return GroupOfTwo(meeting, terms.device, timeout=FORM_TIMEOUT)


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _lose_unless_met(link: CollectiveLink, reason: str) -> None:
    if not link.was_met:
        link.lose(reason)


def _refusal(verdict: HelloReply.Verdict, reason: str) -> tuple[HelloReply, None]:
    return HelloReply(verdict=verdict, reason=reason), None
