"""A node that cannot write its state folder: it does nothing about newer plans, says so, and comes back by itself."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.base.activities import Activities
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.cluster.records import Device, NodeRecord, PlanRecord, WorkerPart, seen_key
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.situation import JobSituation
from headway.daemon.node.membership import Membership
from headway.daemon.plan.cluster_plan import PlanRefused
from headway.daemon.plan.plan_question import ask
from headway.daemon.plan.planner import make_plan
from headway.daemon.worker.goal import Action
from tests.rigs.agent_views import (
    SPLIT,
    due,
    job,
    node,
    node_record,
    view_of,
    worker,
)
from tests.rigs.simulated_cluster import small_spec

FULL = "state_dir /s cannot be written: No space left on device"
NODE = node_record("a", devices=(Device(kind="cpu"),))


class Memory:
    """A state folder whose disk is full, until it is not."""

    def __init__(self) -> None:
        self.generations = {"j": 1}
        self.is_full, self.answers = True, threading.Event()
        self.answers.set()

    def knows(self, seen: dict[str, int]) -> bool:
        return self.generations == seen

    def saw_generations(self, seen: dict[str, int]) -> bool:
        self.answers.wait()
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.generations = seen
        return True


async def test_a_node_with_a_full_state_folder_stays_out_until_there_is_room() -> None:
    """Meanwhile it announces its old generations, also while the folder does not answer; with room the new ones."""
    record = NODE
    memory, activities = Memory(), Activities()

    class Registration:
        @property
        def record(self) -> NodeRecord:
            return record

        def change(self, **fields: Any) -> None:
            nonlocal record
            record = replace(record, **fields)

    cluster, config = SimpleNamespace(view=ClusterView()), SimpleNamespace(state_dir="/s")
    house = SimpleNamespace(memory=memory, activities=activities, cluster=cluster, config=config)
    membership = Membership.__new__(Membership)
    membership._services, membership._registration, membership._troubles = house, Registration(), {}  # type: ignore[assignment]
    membership._state_folder = FileThreads("state folder", num_at_once=1, silence_s=0.1, most_hung=1)
    assert not await membership._remember_generations()
    assert (record.stays_out, record.generations) == (FULL, {"j": 1})
    assert activities.ailments == {"state folder": FULL}
    memory.answers.clear()
    assert not await membership._remember_generations()
    assert record.stays_out == "state_dir /s cannot be written: its file system does not answer"
    memory.answers.set()
    memory.is_full = False
    while not await membership._remember_generations():
        await asyncio.sleep(0.01)
    assert (record.stays_out, record.generations, activities.ailments) == ("", {}, {})


def test_new_plans_leave_out_a_node_with_a_full_state_folder() -> None:
    """A node alone gets no plan, a second node gets it instead, and a `next` that names the full node is dropped."""
    out = replace(NODE, stays_out=FULL)
    alone = make_plan(small_spec("j"), [out])
    assert isinstance(alone, PlanRefused)
    assert f"node a stays out of plans: {FULL}" in alone.reason
    assert [slot.node for slot in ask(small_spec("j"), [out, replace(NODE, name="b")]).slots] == ["b"]
    view = ClusterView(nodes={"a": replace(out, incarnation=SPLIT.workers[0].node_incarnation)})
    situation = JobSituation(job=JobView(name="j", next=SPLIT), view=view, now=0.0, written_at=0.0)
    assert situation.next.unusable is not None


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_node_obeys_no_plan_that_it_has_not_written_down(is_remembered: bool) -> None:
    """Without the number of `next` in its state folder, it prepares no worker."""
    found = job(next=SPLIT)
    remembered = {seen_key("j", found.uid): SPLIT.generation if is_remembered else SPLIT.generation - 1}
    steps = due(view_of(found), node(worker(), remembered=remembered))
    assert (Action.PREPARE in steps) is is_remembered


def plan(node: str) -> PlanRecord:
    """One stage on a node."""
    stage = WorkerPart(node=node, node_incarnation=f"{node}-1", device_index=0, layers=("embed",), depth=1)
    return PlanRecord(generation=1, timeline=1, workers=(stage,))
