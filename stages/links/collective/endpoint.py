"""Opens collective links: the two sides meet over the gRPC server of the links, with mTLS. Over it they also exchange
the keys that torch.distributed asks for.

The hello is that of every link (`hello_gate.py`), and so is the way to dial (`dial_loop.py`).
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import torch

from headway.proto.data_pb2 import HelloReply
from headway.stages.device.device import StageDevice
from headway.stages.device.opening import open_device
from headway.stages.links.collective.group import ACCEPTOR, DIALLER, GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.link import CollectiveLink
from headway.stages.links.collective.nccl_direction import OpenDirections, nccl_directions
from headway.stages.links.collective.nccl_settings import FORM_TIMEOUT
from headway.stages.links.collective.rendezvous import KEYS_METHOD, KeysClient, LinkKeys, PeerStore, answer_keys
from headway.stages.links.hello import Gatekeeper, HelloGate, keep_dialling, lose_unless_connected, read_reply
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.own_sockets import grpc_address
from headway.stages.sockets.shared_port import listening_port, open_channel
from headway.stages.sockets.tls_identity import Identity, dialling, is_borne, names_of_client

METHOD = "Meet"


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A link that a neighbour is expected to dial, and its keys."""

    link: CollectiveLink
    keys: LinkKeys

    @property
    def is_over(self) -> bool:
        return self.link.is_over


class CollectiveEndpoint:
    """Opens links. `accept` and `dial` return at once, from any thread but the loop's; the links' server calls
    `methods`.
    """

    def __init__(
        self,
        *,
        loop: LoopThread,
        identity: Identity,
        host: str,
        incarnation: str,
        protocol: int,
        on_stuck: Callable[[str], None],
        open_directions: OpenDirections = nccl_directions,
        device_of: Callable[[torch.device], StageDevice | None] | None = None,
    ) -> None:
        """on_stuck: is called in the loop's thread with the name of a peer whose group does not end.

        open_directions, device_of: how accelerators talk directly, and how the computation of one is marked.
        """
        self._loop = loop
        self._identity = identity
        self._host = host
        self._on_stuck = on_stuck
        self._open_directions = open_directions
        self._device_of = device_of or self._opened
        self._devices: dict[torch.device, StageDevice] = {}
        self._gate: HelloGate[_Awaited] = HelloGate(Gatekeeper(incarnation, protocol))
        self._links: list[CollectiveLink] = []

    @property
    def methods(self) -> dict[str, Callable[[bytes, Any], Awaitable[bytes]]]:
        """Return this endpoint's methods for the server of the links, by name."""
        return {METHOD: self._answer_meet, KEYS_METHOD: self._answer_keys}

    def accept(self, terms: LinkTerms, *, is_last: bool = True) -> CollectiveLink:
        """The link to a neighbour that dials. LinkLost arrives if it has not within `first_contact`.

        is_last: no other `accept` of this generation follows; until then a dialler is told to come again.
        """
        link = self._new_link(terms)
        self._loop.call_soon(self._await, terms, link, is_last)
        return link

    def dial(self, terms: LinkTerms) -> CollectiveLink:
        """The link to a neighbour that accepts. LinkLost arrives if it has not within `first_contact`, or refuses."""
        link = self._new_link(terms)
        self._loop.call_soon(self._gate.meet, terms)
        self._loop.spawn(self._dial(terms, link), name=f"meet {terms.peer}")
        return link

    def cut(self) -> None:
        """Break all links, for tests. Callable from any thread."""
        self._loop.call_soon(self._cut)

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    def _keep(self, link: CollectiveLink) -> None:
        self._links = [*(other for other in self._links if not other.is_over), link]

    def _await(self, terms: LinkTerms, link: CollectiveLink, is_last: bool) -> None:
        self._keep(link)
        self._gate.expect(terms, _Awaited(link, LinkKeys()), is_last=is_last)
        # The timer outlives most links: it must not hold the store.
        limit_s = terms.first_contact.total_seconds()
        self._loop.loop.call_later(limit_s, lose_unless_connected, link, f"did not dial within {limit_s:g} s")

    def _cut(self) -> None:
        for link in self._links:
            link.interrupt()

    async def _answer_meet(self, request: bytes, context: Any) -> bytes:
        """The server's side of Meet."""
        reply, expected, _ = self._gate.judge(request, names_of_client(context.auth_context()))
        if expected is not None:
            terms, link, keys = expected.terms, expected.link.link, expected.link.keys
            reply.store_prefix = keys.token
            if not link.was_connected:
                # Where the hello came from, with the peer's certificate: a name might mean another address here.
                dialled_from = grpc_address(context.peer())
                peer_host = str(dialled_from[0]) if dialled_from else _host_of(terms.peer_address)
                meeting = Rendezvous(keys.store, self._host, peer_host, ACCEPTOR)
                link.meet(partial(self._group, meeting, terms))
        return reply.SerializeToString()

    async def _answer_keys(self, request: bytes, context: Any) -> bytes:
        """Answer Keys."""
        find = partial(self._keys_of, names_of_client(context.auth_context()))
        return await answer_keys(request, find, context)

    def _keys_of(self, names: tuple[str, ...], token: str) -> LinkKeys | None:
        """Of a link with a node of these names."""
        for expected in self._gate:
            keys = expected.link.keys
            is_meant = secrets.compare_digest(keys.token.encode(), token.encode())
            if is_meant and not expected.link.is_over and is_borne(expected.terms.peer_node, names):
                return keys
        return None

    async def _dial(self, terms: LinkTerms, link: CollectiveLink) -> None:
        self._keep(link)
        await keep_dialling(link, terms, partial(self._attempt, link, terms))

    async def _attempt(self, link: CollectiveLink, terms: LinkTerms, timeout_s: float) -> None:
        """Over a connection of its own. Raises as `keep_dialling` wants it; the group forms in a thread of the link."""
        hello = self._gate.hello(terms).SerializeToString()
        credentials = dialling(self._identity)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with open_channel(terms.peer_address, credentials, node=terms.peer_node, options=options) as channel:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/headway.data.Link/{METHOD}")
            try:
                reply = read_reply(await method(hello, timeout=timeout_s))
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        link.meet(partial(self._form, terms, reply))

    def _form(self, terms: LinkTerms, reply: HelloReply) -> GroupOfTwo:
        """In a thread of the link."""
        with KeysClient(self._loop, self._identity, terms.peer_address, node=terms.peer_node) as client:
            store = PeerStore(client, reply.store_prefix, timeout=FORM_TIMEOUT)
            meeting = Rendezvous(store, self._host, _host_of(terms.peer_address), DIALLER)
            return self._group(meeting, terms)

    def _group(self, meeting: Rendezvous, terms: LinkTerms) -> GroupOfTwo:
        """In a thread of the link."""
        directions = self._open_directions(terms.device, timeout=FORM_TIMEOUT)
        return GroupOfTwo(meeting, timeout=FORM_TIMEOUT, open_direction=directions)

    def _new_link(self, terms: LinkTerms) -> CollectiveLink:
        return CollectiveLink(self._loop, terms, self._on_stuck, device=self._device_of(terms.device))

    def _opened(self, device: torch.device) -> StageDevice | None:
        """In the thread that computes."""
        if device.type != "cuda":
            return None
        if device not in self._devices:
            self._devices[device] = open_device(device, on_failure=self._device_failed)
        return self._devices[device]

    def _device_failed(self, error: BaseException) -> None:
        """In a thread of the device."""
        self._loop.call_soon(_fail, error)


def _fail(error: BaseException) -> None:
    """Make an error of a device's thread one of the loop."""
    raise error


def _host_of(address: str) -> str:
    return listening_port(address).rpartition(":")[0].strip("[]")
