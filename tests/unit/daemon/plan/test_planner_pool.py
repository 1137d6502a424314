"""Large plans in a process of their own: the same answers, and what goes wrong there is a reason, not the end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.plan import planner_pool
from headway.daemon.plan.plan_question import PlanQuestion
from headway.daemon.plan.planner import ClusterPlan, answer
from headway.daemon.plan.planner_pool import PlannerPool, PlanningFailedError, is_small, write_message
from tests.rigs.plan_runner import request

DEADLINE_S = 60.0


@pytest.fixture
def pool() -> Iterator[PlannerPool]:
    pool = PlannerPool()
    yield pool
    pool.close()


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_pool, "SMALL_LAYERS", 0)


def question(num_nodes: int, num_blocks: int = 3) -> PlanQuestion:
    return request(num_nodes, num_blocks=num_blocks).question


def children() -> set[int]:
    """Processes of this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ended meanwhile
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_small_plans_need_no_process(pool: PlannerPool) -> None:
    """Three nodes and five layers: no child. Many layers, devices or microbatches are large."""
    before = children()
    assert is_small(question(3))
    assert isinstance(pool.answer(question(3)), ClusterPlan)
    assert children() == before
    assert not is_small(question(3, 1000))
    assert not is_small(question(50))
    train = replace(question(3).spec.train, microbatches=60_000)
    assert not is_small(replace(question(3), spec=replace(question(3).spec, train=train)))


@pytest.mark.usefixtures("everything_is_large")
def test_a_process_gives_the_same_answers_and_is_kept(pool: PlannerPool) -> None:
    """Plans and refusals, one process for all of them; after `close` there is none."""
    before = children()
    for asked in (question(2), question(3), replace(question(2), slots=())):
        assert pool.answer(asked) == answer(asked)
    assert len(children() - before) == 1
    pool.close()
    assert children() == before


def test_a_plan_that_takes_too_much_memory_fails_alone() -> None:
    """20,000 layers, which no rule lets through: the limit strikes in the process; the next plan is computed."""
    pool = PlannerPool(memory_bytes=64 << 20, time_s=DEADLINE_S)
    try:
        with pytest.raises(PlanningFailedError, match=r"20000 layers on 3 devices takes more than 64 MiB of memory"):
            pool.answer(question(3, 20_000))
        assert isinstance(pool.answer(question(12)), ClusterPlan)
    finally:
        pool.close()


def test_a_plan_that_takes_too_long_is_ended() -> None:
    """The process is killed at its time; its end is the reason."""
    pool, before = PlannerPool(time_s=0.05), children()
    try:
        with pytest.raises(PlanningFailedError, match=r"no plan on 64 devices was found within 0.05 s"):
            pool.answer(question(64, 198))
        assert children() == before
    finally:
        pool.close()


@pytest.mark.usefixtures("everything_is_large")
def test_a_process_that_dies_is_a_reason_and_another_follows(pool: PlannerPool) -> None:
    """SIGKILL, as by the kernel for want of memory: told with the status; the next question has a new process."""
    before = children()
    pool.answer(question(2))
    [child] = children() - before
    os.kill(child, signal.SIGSTOP)
    errors: list[str] = []

    def ask() -> None:
        try:
            pool.answer(question(3))
        except PlanningFailedError as error:
            errors.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    while not pool._busy:  # a process that is dead before it is asked is replaced, and nobody is told
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    asking.join(DEADLINE_S)
    assert errors == ["the planning process ended with status -9"]
    assert isinstance(pool.answer(question(3)), ClusterPlan)


def test_the_process_ends_with_its_daemon_whatever_it_computes() -> None:
    """Its standard input ends in the middle of a plan of minutes."""
    pool = PlannerPool()
    process = pool._spawn()
    assert process.stdin is not None
    assert process.stdout is not None
    write_message(process.stdin, question(64, 198))
    process.stdin.close()
    began = time.monotonic()
    try:
        assert process.wait(DEADLINE_S) == 0
        assert time.monotonic() - began < DEADLINE_S
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    finally:
        process.stdout.close()
