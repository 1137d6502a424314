"""A decision may still use some of the computed plans."""

from dataclasses import replace

from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import Desired, Device, NodeRecord, Phase, PlanRecord
from headway.daemon.decide.commands import Decision, Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.plans import MAX_OVERTAKEN, PlanCache, PlanRequest, Purpose
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.plan_question import PlanQuestion, ask
from headway.daemon.plan.planner import answer
from headway.daemon.plan.profiles import Profiles
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

SPEC = small_spec("first")


def node(name: str, life: int = 1, speed: float = 1.0) -> NodeRecord:
    return NodeRecord(
        name=name,
        incarnation=f"{name}-{life}",
        address=f"{name}:1",
        host=name,
        site="here",
        devices=(Device(kind="cpu", speed=speed),),
        memory_bytes=0,
        arithmetic_class="one",
    )


def request(*nodes: NodeRecord, profiles: Profiles | None = None, **conditions: object) -> PlanRequest:
    question: PlanQuestion = ask(SPEC, nodes, profiles=profiles, **conditions)  # type: ignore[arg-type]
    return PlanRequest(job="first", purpose=Purpose.BEST, question=question)


def overtaken(cache: PlanCache, earlier: PlanRequest, present: PlanRequest) -> None:
    """An answer comes, and the decision that follows wants another one."""
    cache.answered(earlier, answer(earlier.question))
    cache.decided([present], jobs=["first"], now=0.0)


def test_an_answer_to_the_very_question_is_used() -> None:
    """It is current, and nothing else is wanted."""
    cache, wanted = PlanCache(), request(node("a"), node("b"))
    assert cache.find(wanted) is None
    cache.answered(wanted, answer(wanted.question))
    found = cache.find(request(node("b"), node("a")))
    assert found is not None
    assert found.is_current
    assert found.outcome == answer(wanted.question)


def test_other_measurements_ask_for_a_newer_plan_and_use_the_old_one() -> None:
    """A link was measured, a device's benchmark came in: the devices are the same."""
    cache, wanted = PlanCache(), request(node("a"), node("b"))
    cache.answered(wanted, answer(wanted.question))
    links = Profiles.of(links={("a", "b"): LinkProbe(round_trip_s=0.1, bytes_per_s=1e6)})
    for later in (request(node("a"), node("b"), profiles=links), request(node("a", speed=3.0), node("b"))):
        found = cache.find(later)
        assert found is not None
        assert not found.is_current


def test_a_plan_from_old_inputs_is_not_taken() -> None:
    """A node came, went, started anew, drains, or serves another job by now: however often, no plan names it."""
    two = request(node("a"), node("b"))
    plan = answer(two.question)
    assert isinstance(plan, ClusterPlan)
    assert {stage.node for stage in plan.workers} == {"a", "b"}
    changed = (
        request(node("a"), node("c")),
        request(node("a"), node("b", life=2)),
        request(node("a"), replace(node("b"), is_draining=True)),
        request(node("a"), node("b"), busy=frozenset({("b", 0)})),
        request(node("a"), node("b"), history=("two",)),
    )
    for present in changed:
        cache = PlanCache()
        for _ in range(2 * MAX_OVERTAKEN):
            overtaken(cache, two, present)
            assert cache.find(present) is None


def test_after_two_overtaken_answers_one_that_is_still_possible_is_used() -> None:
    """Nodes join faster than plans are made: the plan that knows none of the last ones is better than none."""
    cache, two = PlanCache(), request(node("a"), node("b"))
    three = request(node("a"), node("b"), node("c"))
    for _ in range(MAX_OVERTAKEN):
        assert cache.find(three) is None
        overtaken(cache, two, three)
    found = cache.find(three)
    assert found is not None
    assert not found.is_current
    cache.answered(three, answer(three.question))
    cache.decided([], jobs=["first"], now=0.0)
    assert cache.find(two) is None, "an answer in time: patience begins anew"


def test_how_long_a_plan_is_wanted() -> None:
    """From the first decision that misses it until one misses nothing; a job that is gone is forgotten."""
    cache, wanted = PlanCache(), request(node("a"))
    cache.decided([wanted], jobs=["first"], now=3.0)
    cache.decided([request(node("b"))], jobs=["first"], now=4.0)
    assert cache.wanted_since("first") == 3.0
    assert cache.wanted_since("second") is None
    cache.decided([], jobs=["first"], now=5.0)
    assert cache.wanted_since("first") is None
    cache.decided([wanted], jobs=[], now=6.0)
    cache.decided([], jobs=[], now=7.0)
    assert cache.find(wanted) is None


def settled(*names: str) -> SimulatedCluster:
    """A submitted job and nodes that have been there for a while."""
    cluster = SimulatedCluster()
    for name in names:
        cluster.add_node(name)
    cluster.submit(SPEC)
    cluster.truth()
    return cluster


def ask_for(cluster: SimulatedCluster, cache: PlanCache, *, after_s: float = 10.0) -> Decision:
    """Return the leader's decision some seconds later."""
    view, now = cluster.truth(), cluster.now + after_s
    decision = decide(view, now=now, written_at=now, plans=cache)
    cache.decided(decision.missing, jobs=view.jobs, now=now)
    return decision


def test_a_job_waits_for_its_plan_and_says_since_when() -> None:
    """Two nodes, a plan that takes seconds: nothing is decided, then `planning_since`, then the plan is offered."""
    cluster, cache = settled("a", "b"), PlanCache()
    first = ask_for(cluster, cache)
    assert not first.commands
    assert [wanted.job for wanted in first.missing] == ["first"]
    assert first.wake_at == cluster.now + 11.0
    (told,) = ask_for(cluster, cache, after_s=11.5).commands
    assert isinstance(told, Transaction)
    assert cluster.store.transact(told.compare, told.puts, told.deletes)
    assert cluster.phase("first").planning_since == cluster.now + 10.0
    (wanted,) = first.missing
    cache.answered(wanted, answer(wanted.question))
    (offered,) = ask_for(cluster, cache, after_s=12.0).commands
    assert isinstance(offered, Transaction)
    assert cluster.store.transact(offered.compare, offered.puts, offered.deletes)
    assert cluster.phase("first").phase is Phase.PREPARING
    assert cluster.phase("first").planning_since == 0.0


def test_a_node_that_dies_while_a_plan_is_made_is_in_no_plan() -> None:
    """The answer names it: it is asked for anew, and the job is prepared on what is left."""
    cluster, cache = settled("a", "b"), PlanCache()
    (wanted,) = ask_for(cluster, cache).missing
    cluster.kill("b")
    cluster.expire("b")
    cache.answered(wanted, answer(wanted.question))
    late = ask_for(cluster, cache)
    assert not late.commands
    (again,) = late.missing
    cache.answered(again, answer(again.question))
    (offered,) = ask_for(cluster, cache).commands
    assert isinstance(offered, Transaction)
    plan = decode(offered.puts[Keys.of("first", "next")], PlanRecord)
    assert {stage.node for stage in plan.workers} == {"a"}


def test_the_plan_of_a_recovery_comes_before_a_start_and_that_before_a_better_cut() -> None:
    """Three jobs by age: one that runs and could be cut anew, one that has not begun, one whose node died."""
    cluster = SimulatedCluster()
    for name in ("a", "b", "c"):
        cluster.add_node(name)
    for job in ("runs", "starts", "recovers"):
        cluster.submit(small_spec(job, batches=200, max_nodes=1))
    cluster.want("starts", Desired.PAUSED)
    for job in ("runs", "recovers"):
        cluster.calm(until=lambda job=job: cluster.phase(job).phase is Phase.RUNNING)
    cluster.calm(max_rounds=6)
    cluster.want("starts", Desired.RUNNING)
    cluster.calm(until=lambda: cluster.phase("starts").phase is Phase.QUEUED)
    [victim] = {stage.node for stage in decode(cluster.store.values[Keys.of("recovers", "plan")], PlanRecord).workers}
    cluster.kill(victim)
    cluster.expire(victim)
    cluster.add_node("d", speed=9.0)
    wanted = [(request.job, request.purpose) for request in ask_for(cluster, PlanCache(), after_s=30.0).missing]
    assert wanted[0] == ("recovers", Purpose.RECOVERY)
    assert wanted.index(("starts", Purpose.BEST)) < wanted.index(("runs", Purpose.BEST))
