"""A node finds out by itself whether it can use the checkpoint folders of its jobs."""

import asyncio
from collections.abc import Iterator

import pytest

from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.errors import RecoveryError
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.node import checkpoint_access
from headway.daemon.node.checkpoint_access import CheckpointAccess
from headway.daemon.records import PlanRecord, SpecRecord, StagePlan
from tests.fakes.moody_file_system import Mood, moody

STAGE = StagePlan(node="a", node_incarnation="1", device_index=0, layers=("head",), depth=1)
PLAN = PlanRecord(generation=1, timeline=1, stages=(STAGE,))


@pytest.fixture
def mood() -> Iterator[Mood]:
    with moody() as mood:
        yield mood


def job(folder: str) -> JobView:
    spec = JobSpec(job=JobSection(name="j"), fault=FaultSpec(checkpoint_dir=folder))
    return JobView(name="j", plan=PLAN, submission=SpecRecord(spec=spec, uid="u"))


async def until(access: CheckpointAccess, *, lacks: bool) -> None:
    running = asyncio.create_task(access.run())
    async with asyncio.timeout(20.0):
        while ("j" in access.lacking) is not lacks:
            await asyncio.sleep(0.001)
    running.cancel()


async def test_missing_credentials_are_found_before_a_checkpoint_and_their_coming_too(
    mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is named by a plan: it says that it lacks access, with the URL; later it has it, and takes that back."""
    monkeypatch.setattr(checkpoint_access, "LOOK_S", 0.001)
    monkeypatch.setattr(checkpoint_access, "AGAIN_S", 0.01)
    access = CheckpointAccess(node="a", view=ClusterView(jobs={"j": job("moody://b")}), checkpoint_root=None)
    told: list[dict[str, str]] = []
    access.on_change = lambda: told.append(dict(access.lacking))
    mood.error = lambda: PermissionError("Forbidden")
    await until(access, lacks=True)
    assert "moody://b/" in access.lacking["j"]
    assert "this node has no access: Forbidden" in access.lacking["j"]
    mood.error = None
    await until(access, lacks=False)
    assert [bool(lacking) for lacking in told] == [True, False]


@pytest.mark.parametrize("node", ["a", "elsewhere"])
async def test_an_outage_is_no_want_of_access(mood: Mood, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """The server does not answer: nothing is said of this node. A node that no plan names does not even ask."""
    monkeypatch.setattr(checkpoint_access, "LOOK_S", 0.001)
    access = CheckpointAccess(node=node, view=ClusterView(jobs={"j": job("moody://b")}), checkpoint_root=None)
    mood.error = lambda: RecoveryError("moody://b", "away")
    running = asyncio.create_task(access.run())
    async with asyncio.timeout(20.0):
        while node == "a" and not mood.num_calls:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    running.cancel()
    assert not access.lacking
    assert bool(mood.num_calls) is (node == "a")
