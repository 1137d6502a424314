"""A machine cannot import a job's code, on a simulated cluster: plans leave it out, and nobody has failed."""

from dataclasses import replace

from headway.daemon.cluster.records import Failure, Phase
from headway.daemon.jobs.job import DataSpec, JobSpec, PluginsSpec
from headway.daemon.reports.job_report import report_in
from tests.rigs.scenarios import plan
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

WHEEL = PluginsSpec(wheel="m.py", sha256="1" * 64, data=DataSpec(source="/w", sha256="2" * 64))
WHY = "plug-in m:Own: needs scipy, which is not installed on this machine"


def spec_with_code() -> JobSpec:
    return replace(small_spec("first", batches=400).with_values({"train.loss": "m:Own"}), plugins=WHEEL)


def refuse(cluster: SimulatedCluster, name: str) -> None:
    """Its worker says that it cannot prepare, and its node that no job with this code can be there."""
    worker = cluster.nodes[name].workers[0]
    worker.failure = cluster.phase("first").generation, Failure(WHY, refuses_plugins=True)
    worker.failed_job = "first"
    cluster.say(name, ailments={WHEEL.ailment: WHY})


def test_a_node_that_cannot_import_it_gets_no_part_of_the_first_plan() -> None:
    """Two nodes prepare and one refuses: the job trains on the other, and its report names the first one."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
        cluster.say(name, allow_plugins=("any",))
    cluster.submit(spec_with_code())
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PREPARING)
    refuse(cluster, "b")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    assert {stage.node for stage in plan(cluster).workers} == {"a"}
    assert cluster.phase("first").failures.num_deaths == 0
    view = cluster.facts()
    assert view.failures == {}
    [told] = report_in(view, view.jobs["first"]).ailments
    assert told == f"node b cannot import the plug-ins of m.py: {WHY}"


def test_a_job_whose_code_no_node_can_import_waits_and_names_them() -> None:
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.say("a", allow_plugins=("any",))
    cluster.submit(spec_with_code())
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PREPARING)
    refuse(cluster, "a")
    cluster.calm(until=lambda: WHY in cluster.phase("first").reason and cluster.phase("first").phase is Phase.QUEUED)
