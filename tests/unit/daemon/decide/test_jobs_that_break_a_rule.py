"""A job that `submit` refuses, written into etcd without it: the leader refuses it, and no other job waits."""

from dataclasses import replace

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, Phase, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.stages.spec import ModelSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

POISON = JobSpec(job=JobSection(name="poison"), model=ModelSpec(num_hidden_layers=50_000_000))


def test_the_leader_checks_again_what_submit_checks() -> None:
    """A job of 5e7 layers, which no job file may have, fails with the rule's sentence; the next one trains."""
    with pytest.raises(ConfigError):
        parse_job('[job]\nname = "poison"\n[model]\nnum_hidden_layers = 50000000')
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(POISON)
    cluster.submit(small_spec("second"))
    cluster.calm(until=lambda: cluster.phase("second").phase is Phase.FINISHED)
    told = cluster.phase("poison")
    assert told.phase is Phase.FAILED
    assert told.reason.startswith("the submitted job breaks a rule: model.num_hidden_layers: must be at most 1024")


def test_resume_of_such_a_job_fails_it_again() -> None:
    """A wish that it goes on finds the same rule; it never has a plan."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(POISON)
    cluster.calm(until=lambda: cluster.phase("poison").phase is Phase.FAILED)
    before = cluster.phase("poison")
    cluster.want("poison", Desired.RUNNING)
    cluster.calm(until=lambda: cluster.phase("poison").request > before.request)
    cluster.calm(until=lambda: cluster.phase("poison").phase is Phase.FAILED)
    assert cluster.phase("poison").generation == 0


def test_a_running_job_whose_spec_is_overwritten_fails_alone() -> None:
    """Somebody writes another spec over a running job's: that job fails, its workers are freed, the next one trains."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("first", batches=200))
    cluster.submit(small_spec("second"))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    bad = replace(small_spec("first"), model=ModelSpec(num_attention_heads=0))
    cluster.store.transact({}, {Keys.of("first", "spec"): encode(SpecRecord(spec=bad, uid="uid of first"))})
    cluster.calm(until=lambda: cluster.phase("second").phase is Phase.FINISHED)
    assert cluster.phase("first").phase is Phase.FAILED
    assert "num_attention_heads: must be at least 1" in cluster.phase("first").reason


@pytest.mark.parametrize("name", ["..", ".", "a\x1b[2J", "a\nb", "A", "x" * 64])
def test_an_invalid_name_does_not_get_into_the_view(name: str) -> None:
    """Neither a path nor terminal escapes become a job or a node."""
    view = ClusterView()
    for key, value in (
        (Keys.of(name, "spec"), encode(SpecRecord(spec=JobSpec(job=JobSection(name=name))))),
        (Keys.node(f".{name}"), b"{}"),
    ):
        view.apply(key, value, mod_revision=1, create_revision=1)
        assert "a name is 1 to" in view.unreadable[key].reason
    assert not view.jobs
    assert not view.nodes
