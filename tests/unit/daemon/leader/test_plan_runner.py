"""The leader's plans beside its loop: the loop stays responsive, and what comes late is told."""

import asyncio
import signal
import subprocess
import threading
import time

from headway.daemon.decide.plans import PlanCache, PlanRequest
from headway.daemon.leader.plan_runner import AT_ONCE_S, RETRY_S, PlanRunner
from headway.daemon.plan.plan_question import PlanQuestion
from headway.daemon.plan.planner import ClusterPlan, PlanRefused, answer
from headway.daemon.plan.planner_pool import PlannerPool, PlanningFailedError
from tests.rigs.plan_runner import request

DEADLINE_S = 60.0


class StoppedAtFirst(PlannerPool):
    """Its process is stopped as soon as it is there, and goes on when it is told, or at the deadline."""

    process: "subprocess.Popen[bytes] | None" = None

    def _spawn(self) -> "subprocess.Popen[bytes]":
        assert self.process is None, "one is enough"
        self.process = super()._spawn()
        self.process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(DEADLINE_S, self.go_on)
        timer.daemon = True
        timer.start()
        return self.process

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


async def test_the_loop_goes_on_while_a_heavy_plan_is_computed() -> None:
    """12 devices, 200 layers: while its process stands still the loop has its turns; it goes on, and the plan comes."""
    cache = PlanCache()
    planners = StoppedAtFirst()
    runner, wanted = PlanRunner(cache, compute=planners.answer), request(12, num_blocks=198)
    try:
        assert not runner.take_up([wanted], until=time.monotonic() + DEADLINE_S)
        (under_way,) = runner.under_way
        assert runner.wake_at is not None
        for _ in range(100):
            await asyncio.sleep(0.001)
            runner.collect()
        assert not under_way.done()
        assert cache.find(wanted) is None
        planners.go_on()
        await asyncio.wait_for(under_way, DEADLINE_S)
        runner.collect()
    finally:
        planners.close()
    found = cache.find(wanted)
    assert found is not None
    assert isinstance(found.outcome, ClusterPlan)
    assert not runner.under_way


async def test_a_small_plan_is_there_at_once() -> None:
    """The decision that wanted it is taken anew without a turn of the loop."""
    cache, wanted = PlanCache(), request(2)
    answer(wanted.question)  # it is remembered: no machine is too slow
    assert PlanRunner(cache).take_up([wanted], until=time.monotonic() + AT_ONCE_S)
    found = cache.find(wanted)
    assert found is not None
    assert isinstance(found.outcome, ClusterPlan)


async def test_plans_of_older_measurements_are_computed_in_turn() -> None:
    """Measurements never cease, so that all of them are always stale. One that is missing goes before."""
    computed: list[str] = []

    def compute(question: PlanQuestion) -> ClusterPlan | PlanRefused:
        computed.append(question.spec.job.name)
        return answer(question)

    runner = PlanRunner(PlanCache(), compute=compute)
    stale = [request(2, job=name) for name in ("first", "second", "third")]

    async def take_up(missing: list[PlanRequest]) -> None:
        if not runner.take_up(missing, stale, until=time.monotonic() + AT_ONCE_S):
            await asyncio.wait_for(runner.under_way[-1], DEADLINE_S)
            runner.collect()

    for missing in ([], [], [request(2, job="urgent")], [], []):
        await take_up(missing)
    assert computed == ["first", "second", "urgent", "third", "first"]


async def test_a_plan_past_its_deadline_counts_as_none_and_others_have_their_turn() -> None:
    """Its job hears that there is no plan, and another job's plan is computed. A late answer is still used."""
    release, now = threading.Event(), 100.0

    def compute(question: PlanQuestion) -> ClusterPlan | PlanRefused:
        if question.spec.job.name == "first":
            release.wait(DEADLINE_S)
        return answer(question)

    cache = PlanCache()
    runner = PlanRunner(cache, compute=compute, clock=lambda: now, deadline_s=60.0)
    slow, other = request(3), request(3, job="second")
    assert not runner.take_up([slow, other], until=now + 0.01)
    assert not runner.take_up([slow, other], until=now + 0.01), "one at a time"
    assert runner.wake_at == 160.0
    now = 161.0
    runner.collect()
    found = cache.find(slow)
    assert found is not None
    assert isinstance(found.outcome, PlanRefused)
    assert found.outcome.reason == "no plan on 3 devices was found within 60 s"
    if not runner.take_up([slow, other], until=now + AT_ONCE_S):
        await asyncio.wait_for(runner.under_way[-1], DEADLINE_S)
        runner.collect()
    assert cache.find(other) is not None
    release.set()
    await asyncio.wait_for(runner.under_way[0], DEADLINE_S)
    runner.collect()
    found = cache.find(slow)
    assert found is not None
    assert isinstance(found.outcome, ClusterPlan)


async def test_an_error_of_the_planner_refuses_the_plan_of_that_job_alone() -> None:
    """The reason names the error, whether the answer is immediate or late."""
    release = threading.Event()

    def compute(question: PlanQuestion) -> ClusterPlan | PlanRefused:
        if question.spec.job.name == "other":
            return answer(question)
        release.wait(DEADLINE_S)
        raise MemoryError("931 GiB")

    cache = PlanCache()
    runner = PlanRunner(cache, compute=compute)
    poison = request(2)
    assert not runner.take_up([poison], until=time.monotonic())
    release.set()
    await asyncio.wait(runner.under_way, timeout=DEADLINE_S)
    runner.collect()
    found = cache.find(poison)
    assert found is not None
    assert found.outcome == PlanRefused(reason="the planner failed: MemoryError: 931 GiB")
    at_once = request(3)
    if not runner.take_up([at_once], until=time.monotonic() + AT_ONCE_S):
        await asyncio.wait(runner.under_way, timeout=DEADLINE_S)
        runner.collect()
    assert isinstance(cache.find(at_once).outcome, PlanRefused)  # type: ignore[union-attr]
    other = request(2, job="other")
    if not runner.take_up([other], until=time.monotonic() + AT_ONCE_S):
        await asyncio.wait(runner.under_way, timeout=DEADLINE_S)
        runner.collect()
    assert isinstance(cache.find(other).outcome, ClusterPlan)  # type: ignore[union-attr]


async def test_a_plan_that_failed_is_tried_again_though_nothing_has_changed() -> None:
    """A process that died says nothing about the job: after a minute the plan is asked for again, then ever later."""
    now, num = 100.0, 0

    def compute(question: PlanQuestion) -> ClusterPlan | PlanRefused:
        nonlocal num
        num += 1
        if num <= 2:
            raise PlanningFailedError("the planning process ended with status -9")
        return answer(question)

    cache, wanted = PlanCache(), request(2)
    runner = PlanRunner(cache, compute=compute, clock=lambda: now)

    async def ask() -> ClusterPlan | PlanRefused:
        if not runner.take_up([wanted], until=now + AT_ONCE_S):
            await asyncio.wait(runner.under_way, timeout=DEADLINE_S)
            runner.collect()
        found = cache.find(wanted)
        assert found is not None
        return found.outcome

    for pause_s in (RETRY_S, 2 * RETRY_S):
        assert await ask() == PlanRefused(reason="the planning process ended with status -9")
        assert runner.wake_at == now + pause_s
        now += pause_s - 1
        runner.collect()
        assert cache.find(wanted) is not None
        now += 1
        runner.collect()
        assert cache.find(wanted) is None
    assert isinstance(await ask(), ClusterPlan)
    assert runner.wake_at is None


async def test_a_job_that_is_gone_is_forgotten() -> None:
    """Its plan failed and it was removed: nobody wakes for it any more, and a job that is there is tried again."""
    now = 100.0

    def compute(question: PlanQuestion) -> ClusterPlan | PlanRefused:
        raise PlanningFailedError("no memory")

    cache = PlanCache()
    runner = PlanRunner(cache, compute=compute, clock=lambda: now)
    for job in ("gone", "there"):
        if not runner.take_up([request(2, job=job)], until=now + AT_ONCE_S):
            await asyncio.wait(runner.under_way, timeout=DEADLINE_S)
            runner.collect()
        now += 1.0
    assert runner.wake_at == 100.0 + RETRY_S
    cache.decided([], jobs={"there"}, now=now)
    runner.collect()
    assert runner.wake_at == 101.0 + RETRY_S
    cache.decided([], jobs=(), now=now)
    runner.collect()
    assert runner.wake_at is None
