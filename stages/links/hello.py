"""The hello that opens every link: what the dialling side says, which link the accepting side takes it for, and how
often it is repeated.

A hello names protocol, job, generation and both processes. One that is too early is answered `not yet` and dialled
again. One that is too late, or not meant for this process, is answered with the reason, and the dialler gives up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.ids import Generation
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.stream_link import StreamLink
from headway.stages.sockets.tls_identity import is_borne, other_node

log = structlog.get_logger()

HELLO_TIMEOUT_S = 10.0
FIRST_REDIAL_S = 0.02
LAST_REDIAL_S = 0.5
FIRST_ATTEMPT_S = 2.0
ATTEMPT_GROWTH = 1.5
"""How long a redial may take, and how much longer the next one: packets may vanish, and a machine may be slow."""
MAX_JOBS: Final = 64
"""Number of jobs whose newest generation a process remembers: it serves one job after another."""
NEVER_MET: Final = Generation(-1)


class RefusedError(Exception):
    """The neighbour, or what listens in its place, will never accept this link."""


class NotYetError(ConnectionError):
    """The neighbour is there and not ready: it loads its layers, however long that takes."""


@dataclass(slots=True)
class Expected:
    """A link that a neighbour is expected to dial."""

    terms: LinkTerms
    link: StreamLink
    newest_attempt: int = 0


class HelloGate:
    """Of one endpoint, as hellos speak of it. Lives in the loop's thread."""

    def __init__(self, incarnation: str, protocol: int) -> None:
        self._incarnation = incarnation
        self._protocol = protocol
        self._newest: dict[str, Generation] = {}
        """Job to its newest generation: hellos of others are refused."""
        self._expected: dict[str, dict[int, Expected]] = {}
        """Job to the dialling worker's position in its plan."""

    def misdirected(self, message: bytes | memoryview | None) -> tuple[Hello, HelloReply | None]:
        """A hello, and why no link of this process can be meant."""
        try:
            hello = Hello.FromString(bytes(message or b""))
        except DecodeError:
            return Hello(), self.answer(HelloReply.WRONG_PROTOCOL, "the first message is not a hello")
        if hello.protocol != self._protocol:
            reason = f"protocol {hello.protocol} instead of {self._protocol}"
            return hello, self.answer(HelloReply.WRONG_PROTOCOL, reason)
        if hello.expected_incarnation != self._incarnation:
            return hello, self.answer(HelloReply.WRONG_PEER, "another process listens here now")
        return hello, None

    def answer(self, verdict: HelloReply.Verdict, reason: str = "") -> HelloReply:
        """Signed with this process's incarnation."""
        return HelloReply(verdict=verdict, reason=reason, incarnation=self._incarnation)

    def hello(self, terms: LinkTerms) -> Hello:
        """What this side says when it dials. From any thread."""
        return Hello(
            protocol=self._protocol,
            job=terms.job,
            generation=terms.generation,
            incarnation=self._incarnation,
            expected_incarnation=terms.peer_incarnation,
            stage=terms.stage,
            worker=terms.worker,
        )

    def meet(self, terms: LinkTerms) -> None:
        """This generation is in force here: hellos of older ones are stale."""
        self._newest[terms.job] = max(terms.generation, self._newest.pop(terms.job, terms.generation))
        while len(self._newest) > MAX_JOBS:
            del self._newest[next(iter(self._newest))]

    def expect(self, terms: LinkTerms, link: StreamLink, *, is_last: bool) -> None:
        """A neighbour will dial. is_last: no other link of this generation is expected here."""
        if is_last:
            self.meet(terms)
        of_job = {
            worker: expected
            for worker, expected in self._expected.get(terms.job, {}).items()
            if expected.terms.generation >= terms.generation
        }
        of_job[terms.peer_worker] = Expected(terms, link)
        self._expected = {job: links for job, links in self._expected.items() if job in self._newest}
        self._expected[terms.job] = of_job

    def __iter__(self) -> Iterator[Expected]:
        """All links that are expected, or were."""
        return (expected for of_job in self._expected.values() for expected in of_job.values())

    def judge(
        self, message: bytes | memoryview | None, names: Sequence[str]
    ) -> tuple[HelloReply, Expected | None, Hello]:
        """The answer to a hello, and the link that it is for if it is accepted.

        names: those of the certificate of the side that dials.
        """
        hello, refusal = self.misdirected(message)
        expected = None
        if refusal is None:
            expected = self._expected.get(hello.job, {}).get(hello.worker)
            refusal = self._refusal(hello, expected, names)
        if refusal is not None or expected is None:
            assert refusal is not None
            return refusal, None, hello
        expected.newest_attempt = hello.attempt
        return self.answer(HelloReply.ACCEPTED), expected, hello

    def _refusal(self, hello: Hello, expected: Expected | None, names: Sequence[str]) -> HelloReply | None:
        answer, known = self.answer, self._newest.get(hello.job, NEVER_MET)
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


async def keep_dialling(link: StreamLink, terms: LinkTerms, attempt: Callable[[float], Awaitable[None]]) -> None:
    """Attempt after attempt, until one returns or the link is over.

    attempt: gets the seconds that the neighbour has for its answer. Returns when the link needs no other attempt.
    Raises ConnectionError, TimeoutError or RefusedError.
    """
    clock = asyncio.get_running_loop().time
    begun_at, reason = clock(), "no answer"
    pause_s, attempt_s = FIRST_REDIAL_S, HELLO_TIMEOUT_S
    while not link.is_over:
        broken_at, was_connected = link.broken_at, link.was_connected
        since = begun_at if broken_at is None else broken_at
        limit_s = (terms.silence if was_connected else terms.first_contact).total_seconds()
        left_s = since + limit_s - clock()
        if left_s <= 0:
            what = "resumed" if was_connected else "connected"
            return link.lose(f"not {what} within {limit_s:g} s: {reason}", was_unreached=not was_connected)
        try:
            return await attempt(min(attempt_s, left_s))
        except RefusedError as error:
            return link.lose(str(error))
        except NotYetError as error:
            reason, begun_at = str(error), clock()
        except ConnectionError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer within {min(attempt_s, left_s):.1f} s"
        if link.is_over:
            return None
        if link.broken_at != broken_at:  # it had a stream meanwhile
            log.info("link_broken", peer=link.peer, generation=terms.generation, reason=reason)
            pause_s, attempt_s = FIRST_REDIAL_S, FIRST_ATTEMPT_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_REDIAL_S)
        attempt_s = min(ATTEMPT_GROWTH * attempt_s, HELLO_TIMEOUT_S)
    return None


def lose_unless_connected(link: StreamLink, reason: str) -> None:
    """For the side that accepts: the neighbour has had its time to dial."""
    if not link.was_connected:
        link.lose(reason)
