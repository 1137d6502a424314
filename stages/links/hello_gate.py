"""The hello that opens every link: what the dialling side says, and which link the accepting side takes it for.

A hello names protocol, job, generation and both processes. One that is too early is answered `not yet` and dialled
again. One that is too late, or not meant for this process, is answered with the reason, and the dialler gives up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog
from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.links.known_generations import KnownGenerations
from headway.stages.links.link_terms import LinkTerms
from headway.stages.sockets.tls_identity import is_borne, other_node

log = structlog.get_logger()


class RefusedError(Exception):
    """The neighbour, or what listens in its place, will never accept this link."""


class NotYetError(ConnectionError):
    """The neighbour is there and not ready: it loads its layers, however long that takes."""


class Endable(Protocol):
    """A link, or what belongs to one."""

    @property
    def is_over(self) -> bool:
        """Return whether no hello can be for it any more."""
        ...


LinkT = TypeVar("LinkT", bound=Endable)


@dataclass(slots=True)
class Expected(Generic[LinkT]):
    """A link that a neighbour is expected to dial."""

    terms: LinkTerms
    link: LinkT
    newest_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Gatekeeper:
    """One worker process, as hellos speak of it."""

    incarnation: str
    protocol: int

    def misdirected(self, message: bytes | memoryview | None) -> tuple[Hello, HelloReply | None]:
        """A hello, and why no link of this process can be meant."""
        try:
            hello = Hello.FromString(bytes(message or b""))
        except DecodeError:
            return Hello(), self.answer(HelloReply.WRONG_PROTOCOL, "the first message is not a hello")
        if hello.protocol != self.protocol:
            reason = f"protocol {hello.protocol} instead of {self.protocol}"
            return hello, self.answer(HelloReply.WRONG_PROTOCOL, reason)
        if hello.expected_incarnation != self.incarnation:
            return hello, self.answer(HelloReply.WRONG_PEER, "another process listens here now")
        return hello, None

    def answer(self, verdict: HelloReply.Verdict, reason: str = "") -> HelloReply:
        """Signed with this process's incarnation."""
        return HelloReply(verdict=verdict, reason=reason, incarnation=self.incarnation)


class HelloGate(Generic[LinkT]):
    """Of one endpoint. Lives in the loop's thread."""

    def __init__(self, keeper: Gatekeeper) -> None:
        self._keeper = keeper
        self._generations = KnownGenerations()
        self._expected: dict[str, dict[int, Expected[LinkT]]] = {}
        """Job to the dialling worker's position in its plan."""

    def hello(self, terms: LinkTerms) -> Hello:
        """What this side says when it dials. From any thread."""
        return Hello(
            protocol=self._keeper.protocol,
            job=terms.job,
            generation=terms.generation,
            incarnation=self._keeper.incarnation,
            expected_incarnation=terms.peer_incarnation,
            stage=terms.stage,
            worker=terms.worker,
        )

    def meet(self, terms: LinkTerms) -> None:
        """This generation is in force here: hellos of older ones are stale."""
        self._generations.meet(terms.job, terms.generation)

    def expect(self, terms: LinkTerms, link: LinkT, *, is_last: bool) -> None:
        """A neighbour will dial. is_last: no other link of this generation is expected here."""
        if is_last:
            self.meet(terms)
        of_job = {
            worker: expected
            for worker, expected in self._expected.get(terms.job, {}).items()
            if expected.terms.generation >= terms.generation
        }
        of_job[terms.peer_worker] = Expected(terms, link)
        self._expected = {job: links for job, links in self._expected.items() if job in self._generations}
        self._expected[terms.job] = of_job

    def __iter__(self) -> Iterator[Expected[LinkT]]:
        """All links that are expected, or were."""
        return (expected for of_job in self._expected.values() for expected in of_job.values())

    def judge(
        self, message: bytes | memoryview | None, names: Sequence[str]
    ) -> tuple[HelloReply, Expected[LinkT] | None, Hello]:
        """The answer to a hello, and the link that it is for if it is accepted.

        names: those of the certificate of the side that dials.
        """
        hello, refusal = self._keeper.misdirected(message)
        expected = None
        if refusal is None:
            expected = self._expected.get(hello.job, {}).get(hello.worker)
            refusal = self._refusal(hello, expected, names)
        if refusal is not None or expected is None:
            assert refusal is not None
            return refusal, None, hello
        expected.newest_attempt = hello.attempt
        return self._keeper.answer(HelloReply.ACCEPTED), expected, hello

    def _refusal(self, hello: Hello, expected: Expected[LinkT] | None, names: Sequence[str]) -> HelloReply | None:
        answer, known = self._keeper.answer, self._generations.newest(hello.job)
        if hello.generation > known:
            return answer(HelloReply.NOT_YET, f"generation {known} is the newest here")
        if hello.generation < known:
            return answer(HelloReply.STALE, f"generation {known} is in force here")
        terms = expected.terms if expected is not None and expected.terms.generation == known else None
        if terms is None or (hello.stage, hello.incarnation) != (terms.peer_stage, terms.peer_incarnation):
            reason = f"stage {hello.stage} of process {hello.incarnation} is not the one that is awaited"
            return answer(HelloReply.WRONG_PEER, reason)
        if not is_borne(terms.peer_node, names):
            log.warning("hello_of_another_node", peer=terms.peer, node=terms.peer_node, names=names)
            return answer(HelloReply.WRONG_PEER, other_node(terms.peer_node, names))
        assert expected is not None
        if expected.link.is_over:
            return answer(HelloReply.STALE, f"generation {known} is over here")
        if hello.attempt < expected.newest_attempt:
            return answer(HelloReply.STALE, f"attempt {expected.newest_attempt} was here before")
        return None


def read_reply(message: bytes | memoryview | None) -> HelloReply:
    """The answer to a hello that was accepted. Raises NotYetError, RefusedError, ConnectionError."""
    if message is None:
        raise ConnectionError("closed without an answer to the hello")
    try:
        reply = HelloReply.FromString(bytes(message))
    except DecodeError as error:
        raise ConnectionError("an undecodable answer to the hello") from error
    if reply.verdict == HelloReply.NOT_YET:
        raise NotYetError(reply.reason)
    if reply.verdict != HelloReply.ACCEPTED:
        raise RefusedError(f"{HelloReply.Verdict.Name(reply.verdict)}: {reply.reason}")
    return reply
