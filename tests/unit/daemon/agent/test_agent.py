"""The writes of a node's agent to etcd and its store, with an etcd that is a view."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.agent import agent as agents
from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import Step, StepFailures
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.blobs.fetch import Source
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import StateFile, StateRecord, seen_key
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.jobs.job import DataSpec
from headway.daemon.worker.goal import SnapshotMissed, WrittenFile, Wrote
from tests.rigs.agent_scene import G1, PARTS, PLAN, QuietSupervisor, Scene, make_scene, state_key
from tests.rigs.agent_views import (
    node_record,
    now,
)
from tests.rigs.running import running


async def test_a_snapshot_is_registered_under_the_present_lease(scene: Scene) -> None:
    """After its lease lapsed and its records went, the node registers its files again under the new lease."""
    async with scene.at_work():
        assert await scene.write(20) == ""
        await scene.until(lambda: scene.registered(20) is not None)
        record = scene.registered(20)
        assert record is not None
        assert record.files == {part: StateFile(size_bytes=5, checksum=f"sha-{part}") for part in PARTS}
        scene.lease_id = 2
        scene.etcd.revision += 1
        scene.etcd.show(state_key(20), None)
        scene.agent.cluster_changed()
        await scene.until(lambda: scene.registered(20) is not None)
    leases = [lease for lease in scene.etcd.leases if lease]
    assert leases[0] == 1
    assert leases[-1] == 2


@pytest.mark.parametrize("is_sent", [False, True], ids=["before its task begins", "on its way to etcd"])
async def test_a_registration_that_a_new_plan_overtook_is_not_written(
    is_sent: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes back to a new timeline after the decision: the old one's boundary is not registered."""
    back = replace(PLAN, generation=2, timeline=2, ancestry=((1, 10),), workers=(replace(PLAN.workers[0], node="b"),))
    num_overtaken, put = 0, list[str]()
    scene.etcd.on_change = lambda change: put.append(change.key)

    def go_back() -> None:
        nonlocal num_overtaken
        num_overtaken += 1
        scene.etcd.before = lambda: None
        scene.etcd.revision += 1
        scene.etcd.show(Keys.of("j", "plan"), encode(back))

    def begins(_point: str, *, kind: str, node: str) -> None:
        if kind != "Register" or num_overtaken or not scene.store.contents:
            return  # the worker's record is registered first
        if is_sent:
            scene.etcd.before = go_back
        else:
            go_back()

    monkeypatch.setattr("headway.daemon.agent.agent.fault_point", begins)
    async with scene.at_work():
        await scene.write(20)
        await scene.until(lambda: not scene.store.contents)
    assert (num_overtaken, scene.registered(20)) == (1, None)
    assert state_key(20) not in put


async def test_a_write_that_etcd_forgot_is_written_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd comes back from a backup without the last write. The new view makes the write due again, without any
    timeout.
    """
    monkeypatch.setattr("headway.daemon.agent.agent.WATCH_S", 1000.0)
    scene.etcd.is_losing = True
    async with scene.at_work():
        await scene.write(20)
        await scene.until(lambda: scene.etcd.revision > 101)
        assert scene.registered(20) is None
        job = scene.job
        scene.view.start_anew(now=0.0)
        scene.view.jobs["j"] = job
        scene.view.nodes["a"] = node_record("a")
        scene.etcd.is_losing = False
        scene.agent.cluster_changed()
        await scene.until(lambda: scene.registered(20) is not None)


async def test_files_are_unregistered_before_they_are_deleted(scene: Scene) -> None:
    """With a third restorable boundary, the oldest one's record goes while its files are still held."""
    held_at_delete: list[bool] = []

    def note(change: Put | Delete) -> None:
        if isinstance(change, Delete):
            held_at_delete.append(scene.store.get(StateKey("j", 1, 20, "head")) is not None)

    scene.etcd.on_change = note
    async with scene.at_work():
        for boundary in (20, 40, 60):
            await scene.write(boundary)
            await scene.until(lambda boundary=boundary: scene.registered(boundary) is not None)  # type: ignore[misc]
        await scene.until(lambda: not any(key.boundary == 20 for key in scene.store.contents))
    assert held_at_delete == [True]
    assert scene.registered(20) is None
    assert {key.boundary for key in scene.store.contents} == {40, 60}


async def test_only_a_snapshot_that_was_not_written_counts_as_missed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boundary 40 is late and 60 fails: only 60 is fetched from a sibling."""
    seen: list[NodeState] = []

    def look(_: object, node: NodeState, **__: object) -> list[Step]:
        seen.append(node)
        return []

    monkeypatch.setattr("headway.daemon.agent.agent.next_steps", look)
    about: dict[str, Any] = {"job": "j", "generation": 1, "reason": "late"}
    async with scene.at_work():
        scene.agent.worker_missed_snapshot(SnapshotMissed(**about, boundary=40, factor=2, written=True))
        assert not any(node.missed for node in seen)
        scene.agent.worker_missed_snapshot(SnapshotMissed(**about, boundary=60, factor=4))
        await scene.until(lambda: bool(seen) and seen[-1].missed == {G1: (60,)})


async def test_a_damaged_file_leaves_store_disk_and_record(scene: Scene, tmp_path: Path) -> None:
    """A worker refuses the file."""
    async with scene.at_work():
        await scene.write(20)
        await scene.until(lambda: scene.registered(20) is not None)
        path = tmp_path / "store" / "j" / "1" / "20" / "head.safetensors"
        scene.agent.worker_refused_file(str(path))
        await scene.until(lambda: not path.exists())
        await scene.until(lambda: "head" not in (record.files if (record := scene.registered(20)) else {"head": 0}))
    assert "1 file was found damaged and dropped, the last one head at boundary 20" in scene.store.damage


async def test_a_late_snapshot_of_an_abandoned_timeline_is_deleted(scene: Scene) -> None:
    assert await scene.write(20, timeline=7) == ""
    assert not scene.store.contents
    assert not list(scene.store.directory_of("j", 7, 20).iterdir())


async def test_a_snapshot_beyond_the_quota_is_dropped_whole(scene: Scene, tmp_path: Path) -> None:
    """The reason is one line, and the files that were already written are deleted."""
    assert "store_quota_bytes allows 1000" in await scene.write(20, size_bytes=400)
    assert not scene.store.contents
    await scene.store.removed()
    assert list((tmp_path / "store").iterdir()) == []


async def test_files_of_a_stop_are_kept_beyond_the_quota(scene: Scene) -> None:
    """Without them, the job would compute everything since the last boundary again."""
    path = scene.store.directory_of("j", 1, 5) / "head.safetensors"
    path.write_bytes(b"s" * 2000)
    file = WrittenFile(layer="head", path=str(path), size_bytes=2000, checksum="x")
    wrote = Wrote(job="j", generation=1, boundary=5, timeline=1, files=(file,))
    assert await scene.agent.worker_wrote(wrote) == ""
    assert [file.path for file in scene.store.contents.values()] == [path]


async def test_a_holder_that_is_gone_is_given_up_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holder b does not answer. As soon as its record goes, c is asked, without waiting for a timeout."""
    asked: list[list[str]] = []
    holders = {name: str(NodeEndpoint(name, f"{name}:1")) for name in "bc"}

    async def fetch(store: object, key: object, sources: Callable[[], Iterable[Source]], **_: object) -> None:
        asked.append([source.name for source in sources()])
        await asyncio.Event().wait()

    monkeypatch.setattr(StateStore, "bring", fetch)
    own = scene.view.nodes["a"]
    for name in "bc":
        scene.view.nodes[name] = replace(own, name=name, incarnation=f"{name}-1", address=f"{name}:1")
        files = {part: StateFile(size_bytes=5, checksum=f"sha-{part}") for part in PARTS}
        scene.job.state.setdefault((1, 20), {})[name] = StateRecord(incarnation=f"{name}-1", generation=1, files=files)
    back = {"generation": 2, "timeline": 2, "ancestry": ((1, 20),), "boundary": 20, "source": "nodes"}
    scene.job.plan = replace(PLAN, **back, source_timeline=1)  # type: ignore[arg-type]
    supervisor = QuietSupervisor()
    supervisor.statuses = (now(supervisor.statuses[0], prepared=2),)
    async with running(scene.agent.run(supervisor)):  # type: ignore[arg-type]
        await scene.until(lambda: [holders["b"], holders["c"]] in asked)
        del scene.view.nodes["b"]
        scene.agent.cluster_changed()
        await scene.until(lambda: [holders["c"]] in asked)


async def test_a_fetch_cancelled_before_it_began_is_due_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan 2 is dropped before its fetch of the head begins; plan 3 fetches the same file."""
    asked: list[str] = []

    async def fetch(*about: object, **_: object) -> None:
        key = about[1]
        assert isinstance(key, StateKey)
        asked.append(key.layer)
        await asyncio.Event().wait()

    monkeypatch.setattr(StateStore, "bring", fetch)
    scene.view.steady_since = -1000.0
    scene.view.nodes["b"] = replace(scene.view.nodes["a"], name="b", incarnation="b-1", address="b:1")
    held = {part: StateFile(size_bytes=5, checksum=f"sha-{part}") for part in PARTS if part != "head"}
    scene.job.state[1, 20] = {"b": StateRecord(incarnation="b-1", generation=1, files=held)}
    back = {"timeline": 2, "ancestry": ((1, 20),), "boundary": 20, "source": "nodes", "source_timeline": 1}
    scene.job.plan = replace(PLAN, generation=2, **back)  # type: ignore[arg-type]
    supervisor = QuietSupervisor()
    supervisor.statuses = (now(supervisor.statuses[0], prepared=2),)
    async with scene.at_work(supervisor):
        await scene.until(lambda: bool(supervisor.statuses[0].failures))
        assert asked == []
        held["head"] = StateFile(size_bytes=5, checksum="sha-head")
        scene.job.plan = replace(scene.job.plan, generation=3)
        supervisor.statuses = (replace(now(supervisor.statuses[0], prepared=3), failures={}),)
        scene.agent.cluster_changed()
        await scene.until(lambda: {"embed", "block.0", "head"} <= set(asked))


async def test_a_background_copy_yields_to_a_worker_that_needs_the_file(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow copy ends, and the file is fetched at full speed."""
    asked: list[tuple[str, bool]] = []
    ended: list[str] = []

    def holder(*_: object, unhurried: bool, **__: object) -> Source:
        return Source("unhurried" if unhurried else "at once", cast("Any", None))

    async def fetch(store: object, key: object, sources: Callable[[], Iterable[Source]], **_: object) -> None:
        assert isinstance(key, StateKey)
        asked.append((key.layer, next(iter(sources())).name == "unhurried"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(key.layer)
            raise

    monkeypatch.setattr("headway.daemon.agent.files.holder", holder)
    monkeypatch.setattr(StateStore, "bring", fetch)
    scene.view.nodes["b"] = replace(scene.view.nodes["a"], name="b", incarnation="b-1", address="b:1")
    own = scene.job.plan = replace(
        PLAN,
        workers=(
            replace(PLAN.workers[0], node="b", node_incarnation="b-1", layers=("embed",)),
            replace(PLAN.workers[0], layers=("block.0", "head")),
        ),
    )
    files = {"embed": StateFile(size_bytes=5, checksum="sha-embed")}
    scene.job.state[1, 20] = {"b": StateRecord(incarnation="b-1", generation=1, files=files)}
    supervisor = QuietSupervisor()
    async with running(scene.agent.run(supervisor)):  # type: ignore[arg-type]
        await scene.until(lambda: asked == [("embed", True)])
        back = {"generation": 2, "timeline": 2, "ancestry": ((1, 20),), "boundary": 20, "source": "nodes"}
        scene.job.plan = replace(own, workers=PLAN.workers, **back, source_timeline=1)  # type: ignore[arg-type]
        supervisor.statuses = (now(supervisor.statuses[0], prepared=2),)
        scene.agent.cluster_changed()
        await scene.until(lambda: ("embed", False) in asked)
        assert ended == ["embed"]


async def test_a_job_whose_records_raise_an_error_fails_here_and_the_others_are_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in planning steps for job j fails its worker once, with the reason; the agent continues."""

    def broken(*_: object) -> Iterator[Step]:
        raise ZeroDivisionError("no layers")

    supervisor = QuietSupervisor()
    monkeypatch.setattr("headway.daemon.agent.steps_due._plan_steps", broken)
    async with scene.at_work(supervisor):
        await scene.until(lambda: bool(supervisor.failed))
        scene.agent.cluster_changed()
        await scene.until(lambda: not scene.agent._due.is_set())
    assert supervisor.failed == [(G1, "node a cannot serve this job: ZeroDivisionError: no layers")]


async def test_a_step_that_raises_is_retried_after_a_pause(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration fails twice with a bug and then succeeds."""
    transaction, num = scene.etcd.transaction, 0

    async def buggy(conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        nonlocal num
        num += 1
        if num <= 2:
            raise AttributeError("nobody expected this")
        return await transaction(conditions, changes)

    monkeypatch.setattr(scene.etcd, "transaction", buggy)
    async with scene.at_work():
        assert await scene.write(40) == ""
        await scene.until(lambda: scene.view.revision_of(state_key(40)) > 0)
    assert num >= 3


NUM_JOBS = 500


def test_repeated_failures_are_counted_and_logged_once() -> None:
    """The same reason twice, another one, a success, and the first again."""
    failures = StepFailures()
    told = [failures.failed("step", reason) for reason in ("a", "a", "b")]
    assert told == [(1, True), (2, False), (3, True)]
    failures.start_over("step")
    assert failures.failed("step", "b") == (1, False)
    failures.succeeded("step")
    assert failures.failed("step", "b") == (1, True)


def test_a_step_that_is_not_due_any_more_is_forgotten() -> None:
    failures = StepFailures()
    for number in range(NUM_JOBS):
        failures.failed(number, "refused")
        failures.keep_only({number, number - 1})
        assert len(failures) <= 2
    assert failures.failed(NUM_JOBS - 1, "refused") == (2, False)
    failures.keep_only(())
    assert not failures


async def test_failures_of_a_removed_job_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No registration of its files succeeds, then the job is removed: the agent keeps nothing about it."""
    scene = make_scene(tmp_path, library=SimpleNamespace(state_of=str))
    monkeypatch.setattr(agents, "REST_S", 0.001)

    async def refused(conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        raise StoreUnreachableError("etcd", "is full")

    monkeypatch.setattr(scene.etcd, "transaction", refused)
    async with scene.at_work():
        for boundary in (20, 40, 60):
            await scene.write(boundary)
        await scene.until(lambda: len(scene.agent._failures) > 0)
        del scene.view.jobs["j"]
        scene.agent.cluster_changed()
        await scene.until(lambda: len(scene.agent._failures) == 0)


def test_jobs_that_are_over_leave_no_generation_and_no_data(tmp_path: Path) -> None:
    """A name is submitted again and again with new data. The agent remembers only what etcd has or the node has written
    down.
    """
    remembered: dict[str, int] = {}
    scene = make_scene(tmp_path, remembered=lambda: remembered)
    supervisor = QuietSupervisor()
    job = scene.job
    assert job.submission is not None
    for number in range(NUM_JOBS):
        spec = replace(job.submission.spec, data=DataSpec(sha256=f"sha-{number}"))
        job.submission = replace(job.submission, uid=f"u{number}", spec=spec)
        scene.agent._data_paths[f"sha-{number}"] = "/data"
        remembered = {seen_key("j", f"u{number - 1}"): 1}
        state = scene.agent._node_state(supervisor)  # type: ignore[arg-type]
        assert state.in_force.keys() <= {seen_key("j", f"u{number}"), seen_key("j", f"u{number - 1}")}
        assert state.in_force[seen_key("j", f"u{number}")] == 1
        assert state.data_paths.keys() == {f"sha-{number}"}
