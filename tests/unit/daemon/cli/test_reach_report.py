"""People see the nodes that do not reach each other, and the pair for which a job waits."""

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import GoodputRecord, Port, ReachFact
from headway.daemon.records.records import (
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.reports.job_report import link_waits
from headway.daemon.reports.node_list import node_lines, report_nodes
from headway.daemon.situation.failures import awaited_pair, standing_pairs
from tests.unit.daemon.costs.test_blocked_ways import REFUSED, Scene, fact

PLAN = PlanRecord(
    generation=2,
    timeline=1,
    workers=tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=(name,), depth=1) for name in "abc"
    ),
)


def scene(phase: Phase, leaf: str, *, state: WorkerState, proven: dict[str, tuple[int, ...]] | None = None) -> Scene:
    """Nodes a, b and c, whose workers are three stages of one job."""
    found = Scene("a", "b", "c")
    found.put(Keys.of("j", "spec"), SpecRecord(spec=JobSpec(job=JobSection(name="j"))))
    found.put(Keys.of("j", "phase"), PhaseRecord(phase=phase, generation=2))
    found.put(Keys.of("j", leaf), PLAN)
    for position, name in enumerate("abc"):
        record = WorkerRecord(
            node=name,
            incarnation="w",
            address=f"{name}:7100",
            pid=1,
            state=state,
            proven=(proven or {}).get(name, ()),
        )
        found.put(Keys.worker("j", 2, position), record)
    return found


def stands(found: Scene, position: int, waits_for: str, awaited_worker: int) -> None:
    record = GoodputRecord(node="abc"[position], incarnation="w", waits_for=waits_for, awaited_worker=awaited_worker)
    found.put(Keys.goodput("j", 2, position), record)


def test_nodes_shows_each_way_that_is_blocked() -> None:
    found = Scene("a", "b", "c")
    daemon = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:7001")
    found.found("a", daemon, fact("b"), fact("c", ""))
    lines = "\n".join(node_lines(found.view))
    assert f"cannot reach the worker port of b at b:7100: {REFUSED}" in lines
    [told] = [node for node in report_nodes(found.view) if node["name"] == "a"]
    assert {entry["reason"] for entry in told["reach"]} == {"", REFUSED}
    assert all("measured_at" in entry for entry in told["reach"])


def test_status_names_who_has_not_reached_whom_before_a_plan_is_in_force() -> None:
    found = scene(Phase.PREPARING, "next", state=WorkerState.READY, proven={"a": (1,), "b": (0,), "c": (1,)})
    assert link_waits(found.view, found.view.jobs["j"]) == ["waiting for stage 1 on b to reach stage 2 on c at c:7100"]


def test_a_job_that_stands_still_names_the_pair_at_the_end_of_the_chain() -> None:
    """c waits for b, and b for a, which is at work: the sentence names a, however many stages are between."""
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)
    job = found.view.jobs["j"]
    assert link_waits(found.view, job) == []
    stands(found, 2, "a neighbour of any name", 1)
    assert awaited_pair(job, PLAN) is None, "two others are at work"
    stands(found, 1, "stage 0 at a:7100", 0)
    assert link_waits(found.view, job) == ["no progress: stage 1 on b waits for stage 0 on a"]
    stands(found, 0, "stage 1 at an unknown address", 1)
    assert awaited_pair(job, PLAN) in {(0, 1), (1, 0)}, "both ends of one link wait"
    assert standing_pairs(job, PLAN) == {("a", "b"), ("b", "c")}


def test_a_link_that_could_not_be_reopened_is_shown_first() -> None:
    found = scene(Phase.RUNNING, "plan", state=WorkerState.RUNNING)
    found.found("a", fact("b"))
    found.found("a", fact("b"), fact("c"))
    [told] = link_waits(found.view, found.view.jobs["j"])
    assert "a cannot reach the worker port of b at b:7100" in told
