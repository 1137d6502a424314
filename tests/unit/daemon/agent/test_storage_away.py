"""An agent reports an outage while the data of a job cannot be read, and gives up on a mistake."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.agent import agent as agent_module
from headway.daemon.agent.agent import MAX_ATTEMPTS
from headway.daemon.agent.files import StateKeeper
from headway.daemon.agent.steps import Fetch
from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import DamagedCopyError, RecoveryError, StorageAwayError
from headway.daemon.blobs.fetch import Source
from headway.daemon.blobs.library import Reading
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.records import Phase, PhaseRecord, SpecRecord
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.worker.goal import JobGeneration
from headway.stages.state.file_digest import FileDigest
from tests.rigs.agent_scene import PLAN, QuietSupervisor, make_scene
from tests.rigs.running import running

AWAY = StorageAwayError("/mnt/data", "its file system has not answered for 60 s")
MISSING = RecoveryError("/mnt/data", "no token shards here")


@dataclass
class Library:
    """The data of one job, which cannot be opened while there is an error."""

    error: Exception | None
    num_asked: int = 0
    earlier: list[Exception] = field(default_factory=list)
    """Errors of the attempts before that."""
    reading: dict[str, Reading] = field(default_factory=dict)

    def read_again_soon(self, folder: Path) -> None:
        """Nothing decays here."""

    async def open(self, _: DataSpec) -> Path:
        self.num_asked += 1
        if self.earlier:
            raise self.earlier.pop(0)
        if self.error is not None:
            raise self.error
        return Path("/mnt/data")

    def state_of(self, _: str) -> str:
        return ""


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], tuple[Any, ...]]:
    """An agent that is to prepare a job's first stage; steps that failed rest for a moment only."""
    monkeypatch.setattr(agent_module, "REST_S", 0.001)

    def begin(error: Exception) -> tuple[Any, ...]:
        library, activities = Library(error), Activities()
        scene = make_scene(tmp_path, library=library, activities=activities)
        scene.job.plan, scene.job.next, scene.job.phase = None, PLAN, PhaseRecord(phase=Phase.PREPARING)
        return scene.agent, library, activities, QuietSupervisor(is_idle=True)

    return begin


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_outage_is_reported_and_retried_for_as_long_as_it_lasts(
    at_work: Callable[[Exception], tuple[Any, ...]],
) -> None:
    """The node's record has the reason through far more attempts than a transfer has, until the data is back."""
    agent, library, activities, worker = at_work(AWAY)
    async with running(agent._carry_out_steps(worker)):
        await until(lambda: library.num_asked > 2 * MAX_ATTEMPTS)
        assert activities.ailments == {"data of j": str(AWAY)}
        assert worker.failed == []
        library.error = None
        await until(lambda: bool(worker.goals))
        assert activities.ailments == {}


async def test_data_that_was_never_there_is_given_up(at_work: Callable[[Exception], tuple[Any, ...]]) -> None:
    """A wrong path on this node fails the worker's generation after MAX_ATTEMPTS, with the reason."""
    agent, library, activities, worker = at_work(MISSING)
    async with running(agent._carry_out_steps(worker)):
        await until(lambda: bool(worker.failed))
        assert library.num_asked == MAX_ATTEMPTS
        assert "no token shards here" in worker.failed[0][1]
        assert activities.ailments == {}


async def test_attempts_during_an_outage_are_not_charged_afterwards(
    at_work: Callable[[Exception], tuple[Any, ...]],
) -> None:
    """Twenty attempts meet an outage and one more another error, which counts as the first; the next succeeds."""
    agent, library, _, worker = at_work(AWAY)
    library.error, library.earlier = None, [AWAY] * 20 + [MISSING]
    async with running(agent._carry_out_steps(worker)):
        await until(lambda: bool(worker.goals or worker.failed))
        assert worker.failed == []
        assert library.num_asked == 22


FETCH = Fetch(
    0, JobGeneration("j", 1), StateKey("j", 1, 5, "head"), (), "/mnt/c", FileDigest(size_bytes=1, checksum="c")
)


@pytest.mark.parametrize("error", [RecoveryError("j/1/5/head", "store_quota_bytes allows 10"), KeyError("head")])
async def test_an_error_that_is_no_outage_is_given_up_after_five_attempts(
    at_work: Callable[[Exception], tuple[Any, ...]], error: Exception
) -> None:
    """No room for a file, or a bug in the daemon, is not reported as an outage."""
    agent, _, activities, worker = at_work(AWAY)
    for _ in range(MAX_ATTEMPTS):
        assert worker.failed == []
        agent._failed(FETCH, error, worker)
    assert len(worker.failed) == 1
    assert activities.ailments == {}


async def test_a_checkpoint_that_is_away_is_waited_for(at_work: Callable[[Exception], tuple[Any, ...]]) -> None:
    agent, _, activities, worker = at_work(AWAY)
    for _ in range(2 * MAX_ATTEMPTS):
        agent._failed(FETCH, AWAY, worker)
    assert worker.failed == []
    assert activities.ailments == {"checkpoint of j": str(AWAY)}


async def test_opening_data_is_cancelled_when_its_plan_is_dropped(
    at_work: Callable[[Exception], tuple[Any, ...]],
) -> None:
    agent, library, _, worker = at_work(AWAY)
    began, ended = asyncio.Event(), asyncio.Event()

    async def hang(_: DataSpec) -> Path:
        began.set()
        try:
            return await asyncio.Future()
        finally:
            ended.set()

    library.open = hang
    async with running(agent._carry_out_steps(worker)):
        await asyncio.wait_for(began.wait(), 20)
        agent._around.member.view.jobs.clear()
        agent.cluster_changed()
        await asyncio.wait_for(ended.wait(), 20)


@pytest.mark.parametrize("is_sound_elsewhere", [True, False])
async def test_damage_of_a_checkpoint_counts_if_another_node_finds_it_too(
    is_sound_elsewhere: bool, tmp_path: Path
) -> None:
    """This node reads other bytes than it should. Another node reads them well → they are taken; else it is damage."""
    expected = FileDigest(size_bytes=4, checksum=sha256(b"good").hexdigest())

    def giving(name: str, data: bytes, *, is_own_place: bool = False) -> Source:
        async def read(offset: int) -> AsyncIterator[bytes]:
            yield data[offset:]

        return Source(name, read, is_own_place=is_own_place)

    class OneBadReader(StateKeeper):
        def _place(self, *_: object) -> Source:
            return giving("/mnt/c/head", b"evil", is_own_place=True)

        def _nodes(self, *_: object, **__: object) -> list[Source]:
            return [giving("b", b"good" if is_sound_elsewhere else b"evil")]

    store = StateStore(tmp_path / "store")
    store.open()
    view = ClusterView(jobs={"j": JobView(name="j", submission=SpecRecord(spec=JobSpec(job=JobSection(name="j"))))})
    around: dict[str, Any] = {"client": None, "checkpoint_root": None, "outgoing": OutgoingTransfers(0.0)}
    keeper = OneBadReader(node="a", view=view, store=store, **around)
    with nullcontext() if is_sound_elsewhere else pytest.raises(DamagedCopyError, match=r"^/mnt/c/head: has SHA-256"):
        await keeper.fetch(replace(FETCH, expected=expected))
    assert (FETCH.key in store.contents) is is_sound_elsewhere
