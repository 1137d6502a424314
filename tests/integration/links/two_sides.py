"""The terms of a link between stage 0 and stage 1, seen from either side."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

from headway.stages.ids import Generation, StageIndex
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Inbox
from headway.stages.links.link_terms import LinkTerms

GENERATION = Generation(7)
SOON = timedelta(seconds=20)
_numbers = itertools.count()


def new_job(kind: str) -> str:
    """Return a name that no link of this process has had.

    Endpoints outlive a test. A hello for a name of an earlier test finds the link of that test, as both have one
    generation: it is refused as stale, or its frames arrive where nobody looks.
    """
    return f"{kind}-{next(_numbers)}"


def upper_terms(job: str, port: int, *, inbox: Inbox, contract: FrameContract, **changes: Any) -> LinkTerms:
    """Return the terms of stage 0, which dials."""
    terms = LinkTerms(
        job=job,
        generation=GENERATION,
        stage=StageIndex(0),
        worker=0,
        peer_stage=StageIndex(1),
        peer_worker=1,
        peer_incarnation="below",
        peer_node="node",
        peer_name="stage 1",
        peer_address=f"127.0.0.1:{port}",
        inbox=inbox,
        contract=contract,
        first_contact=SOON,
        silence=SOON,
    )
    return replace(terms, **changes)


def lower_terms(job: str, *, inbox: Inbox, contract: FrameContract, **changes: Any) -> LinkTerms:
    """Return the terms of stage 1, which accepts."""
    terms = LinkTerms(
        job=job,
        generation=GENERATION,
        stage=StageIndex(1),
        worker=1,
        peer_stage=StageIndex(0),
        peer_worker=0,
        peer_incarnation="above",
        peer_node="node",
        peer_name="stage 0",
        peer_address="127.0.0.1:1",
        inbox=inbox,
        contract=contract,
        first_contact=SOON,
        silence=SOON,
    )
    return replace(terms, **changes)
