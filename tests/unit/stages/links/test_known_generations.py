"""A worker's process remembers generations over all the jobs that it serves."""

from types import SimpleNamespace
from typing import cast

from headway.proto.data_pb2 import HelloReply
from headway.stages.ids import Generation
from headway.stages.links.hello import MAX_JOBS, HelloGate
from headway.stages.links.link_terms import LinkTerms


def terms(job: str, generation: int) -> LinkTerms:
    """All that a gate looks at where no link is expected."""
    dialling = {"stage": 0, "worker": 0, "peer_incarnation": "w-1"}
    return cast(LinkTerms, SimpleNamespace(job=job, generation=Generation(generation), **dialling))


def verdict(gate: HelloGate, job: str, generation: int) -> HelloReply.Verdict:
    """What a hello of this generation is answered."""
    return gate.judge(gate.hello(terms(job, generation)).SerializeToString(), ["node-b"])[0].verdict


def test_the_newest_generation_of_a_job_counts() -> None:
    gate = HelloGate("w-1", protocol=1)
    assert verdict(gate, "j", 3) == HelloReply.NOT_YET
    for generation in (3, 7, 5):
        gate.meet(terms("j", generation))
    assert [verdict(gate, "j", g) for g in (5, 7, 8)] == [HelloReply.STALE, HelloReply.WRONG_PEER, HelloReply.NOT_YET]


def test_of_many_jobs_the_last_ones_are_remembered() -> None:
    """One job goes on while ten thousand others come and go; of a forgotten one nothing is stale."""
    gate = HelloGate("w-1", protocol=1)
    for number in range(10_000):
        gate.meet(terms("long", number))
        gate.meet(terms(f"short-{number}", 1))
    assert verdict(gate, "long", 9_998) == HelloReply.STALE
    remembered = [verdict(gate, f"short-{number}", 0) == HelloReply.STALE for number in range(10_000)]
    assert remembered == [False] * (10_000 - MAX_JOBS + 1) + [True] * (MAX_JOBS - 1)
