"""Dials a neighbour until it accepts, refuses for good or has taken too long; a link that breaks is dialled again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from headway.stages.links.hello_gate import NotYetError, RefusedError
from headway.stages.links.link_terms import LinkTerms

log = structlog.get_logger()

HELLO_TIMEOUT_S = 10.0
FIRST_REDIAL_S = 0.02
LAST_REDIAL_S = 0.5
FIRST_ATTEMPT_S = 2.0
ATTEMPT_GROWTH = 1.5
"""How long a redial may take, and how much longer the next one: packets may vanish, and a machine may be slow."""


class DialledLink(Protocol):
    """What the loop asks of a link, in the thread of the event loop."""

    @property
    def peer(self) -> str: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def was_connected(self) -> bool: ...

    @property
    def broken_at(self) -> float | None:
        """When the last stream broke; None while there is one, before the first, and on links that never resume."""
        ...

    def lose(self, reason: str, *, was_unreached: bool = False) -> None: ...


async def keep_dialling(link: DialledLink, terms: LinkTerms, attempt: Callable[[float], Awaitable[None]]) -> None:
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


def lose_unless_connected(link: DialledLink, reason: str) -> None:
    """For the side that accepts: the neighbour has had its time to dial."""
    if not link.was_connected:
        link.lose(reason)
