"""Signatures under jobs that go on: signed again by another operator, or asked for before an authority is dropped."""

import time
from collections.abc import Iterable
from functools import partial

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of
from headway.daemon.errors import ConfigError, ConflictError
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.records.format import decode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import Phase, SpecRecord
from headway.daemon.records.signature import Signature
from headway.daemon.rpc.job_signature import judge, signed_again

OVER = frozenset({Phase.FINISHED, Phase.CANCELLED})
"""Phases after which nobody judges the signature again: a failed job may be resumed."""
MOST_NAMED = 20


async def sign(session: ClusterSession, names: Iterable[str]) -> list[str]:
    """Vouch for jobs with the own certificate. Return a sentence for each. Raises ConfigError, and signs none then,
    for a job that is over and for one whose present signature is not believed.
    """
    if (identity := session.identity) is None:
        raise ConfigError("signs with a certificate: name its folder with --certs", "--certs")
    view = await session.view(judge_signature=partial(judge, ca=identity.ca))
    found = [job_of(view, name) for name in dict.fromkeys(names)]
    for job in found:
        if job.phase.phase in OVER:
            raise ConfigError(f"is {job.phase.phase} already: nobody asks for its signature", f"job {job.name}")
        if job.refusal:
            why = f"{job.refusal}; nobody can vouch for it: submit it again, or continue from its checkpoint"
            raise ConfigError(why, f"job {job.name}")
    told, compares, puts = [], [], []
    for job in found:
        key = Keys.of(job.name, "spec")
        entry = await session.client.get(key)
        if entry is None or entry.mod_revision != view.revision_of(key):
            raise ConflictError(f"job {job.name}", "has just changed; try again")
        raw = signed_again(entry.value, identity, now=time.time())
        if fault := judge(raw, decode(raw, SpecRecord), ca=identity.ca).fault:
            raise ConfigError(fault, f"job {job.name}, signed by you")
        compares.append(Compare.unchanged(key, entry.mod_revision))
        puts.append(Put(key, raw))
        told.append(f"{job.name}: signed again; {decode(entry.value, SpecRecord).signed_by} had signed it before")
    await session.client.transaction(compares, puts)
    return told


async def check_none_is_left(session: ClusterSession, *, both: bytes, alone: bytes) -> None:
    """Raise ConfigError, naming them, if there are jobs that an authority signs for which is about to go.

    both: certificates in PEM of the authorities that are trusted now. alone: of the one that stays.
    """
    believed_by_both = set[str]()

    def judged(raw: bytes, record: SpecRecord) -> Signature:
        if not judge(raw, record, ca=alone).fault:
            believed_by_both.add(record.spec.job.name)
        return judge(raw, record, ca=both)

    view = await session.view(judge_signature=judged)
    going_on = [job for job in view.jobs_in_order() if job.phase.phase not in OVER and not job.refusal]
    left = [job.name for job in going_on if job.name not in believed_by_both]
    if not left:
        return
    more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    raise ConfigError(
        f"nobody would believe the signatures of {', '.join(left[:MOST_NAMED])}{more} any more, so nothing is dropped: "
        f"sign them with a certificate of the new authority, `headway jobs sign {' '.join(left[:MOST_NAMED])}`, or "
        "wait until they end, or cancel them; `headway jobs rm` forgets a failed one",
        "--drop",
    )
