"""A node finds out by itself whether it can use the checkpoint folders of its jobs."""

import asyncio
from collections.abc import Iterator

import pytest

from headway.daemon.agent import files
from headway.daemon.agent.files import CheckpointAccess
from headway.daemon.base.errors import RecoveryError
from headway.daemon.cluster.records import PlanRecord, SpecRecord, WorkerPart
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from tests.rigs.moody_file_system import Mood, moody
from tests.rigs.running import running

STAGE = WorkerPart(node="a", node_incarnation="1", device_index=0, layers=("head",), depth=1)
PLAN = PlanRecord(generation=1, timeline=1, workers=(STAGE,))


@pytest.fixture
def mood() -> Iterator[Mood]:
    with moody() as mood:
        yield mood


def job(folder: str, name: str = "j") -> JobView:
    spec = JobSpec(job=JobSection(name=name), fault=FaultSpec(checkpoint_dir=folder))
    return JobView(name=name, plan=PLAN, submission=SpecRecord(spec=spec, uid="u"))


async def until(access: CheckpointAccess, *, lacks: bool) -> None:
    async with running(access.run()):
        async with asyncio.timeout(20.0):
            while ("j" in access.lacking) is not lacks:
                await asyncio.sleep(0.001)


async def test_missing_credentials_are_reported_before_a_checkpoint_and_withdrawn_later(
    mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node in the plan reports the URL that it cannot access, and withdraws the report once it can."""
    monkeypatch.setattr(files, "LOOK_S", 0.001)
    monkeypatch.setattr(files, "AGAIN_S", 0.01)
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


async def test_a_hung_file_system_delays_no_report_about_another(mood: Mood, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine jobs wait on a hung bucket; the report about another one still comes within a moment."""
    monkeypatch.setattr(files, "LOOK_S", 0.001)
    hung = {f"h{number}": job("moody://hung/c", f"h{number}") for number in range(9)}
    view = ClusterView(jobs={**hung, "j": job("moody://poor/c")})
    access = CheckpointAccess(node="a", view=view, checkpoint_root=None)
    mood.hung = "hung"
    mood.gate.clear()
    mood.error = lambda: PermissionError("Forbidden")
    await until(access, lacks=True)
    assert access.lacking.keys() == {"j"}
    assert mood.num_calls == 2, "one call hangs, and no other was made there"


@pytest.mark.parametrize("node", ["a", "elsewhere"])
async def test_an_outage_is_not_reported_as_missing_access(
    mood: Mood, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """The server does not answer: the node reports nothing. A node outside the plan does not check."""
    monkeypatch.setattr(files, "LOOK_S", 0.001)
    access = CheckpointAccess(node=node, view=ClusterView(jobs={"j": job("moody://b")}), checkpoint_root=None)
    mood.error = lambda: RecoveryError("moody://b", "away")
    async with running(access.run()):
        async with asyncio.timeout(20.0):
            while node == "a" and not mood.num_calls:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
    assert not access.lacking
    assert bool(mood.num_calls) is (node == "a")


async def test_an_access_check_cancelled_before_it_began_is_repeated(
    mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activity ends just as a check is due, and is restarted."""
    monkeypatch.setattr(files, "LOOK_S", 0.001)
    access = CheckpointAccess(node="a", view=ClusterView(jobs={"j": job("moody://b")}), checkpoint_root=None)
    mood.error = lambda: PermissionError("Forbidden")

    def fail() -> None:
        raise KeyError("j")

    with monkeypatch.context() as patch:
        patch.setattr(access, "_forget_jobs_that_are_gone", fail)
        with pytest.raises(BaseExceptionGroup):
            await access.run()
    assert not mood.num_calls
    await until(access, lacks=True)
