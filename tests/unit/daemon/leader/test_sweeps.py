"""Folders of checkpoints that never came to be: which they are, and that they go from a real file system."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.blobs.checkpoint_names import PartFile, boundary_url, part_name, partial_name
from headway.daemon.cluster.lineage import JournalPart
from headway.daemon.cluster.records import CheckpointRecord, Phase, PhaseRecord, PlanRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.leader.sweeps import (
    NUM_LOOKS,
    BoundaryFolder,
    CheckpointSweep,
    stale_checkpoints,
    stale_parts,
)
from tests.rigs.running import running

PLAN = PlanRecord(generation=5, timeline=5, ancestry=((1, 20), (3, 60)))
"""Timeline 3 grew out of 1 at boundary 20, timeline 5 out of 3 at 60."""


def url(timeline: int, boundary: int, directory: str = "checkpoints") -> str:
    return boundary_url(directory, "j", timeline=timeline, boundary=boundary, uid="u")


def job(**fields: object) -> JobView:
    """It runs on timeline 5; its checkpoint is 40 of timeline 3, and 20 is kept."""
    spec = JobSpec(job=JobSection(name="j"), fault=FaultSpec(checkpoint_dir="checkpoints"))
    known: dict[str, object] = {
        "submission": SpecRecord(spec=spec, uid="u"),
        "plan": PLAN,
        "phase": PhaseRecord(phase=Phase.RUNNING, generation=5),
        "checkpoint": CheckpointRecord(timeline=3, boundary=40, url=url(3, 40), earlier=(url(1, 20),)),
    }
    return JobView(name="j", **(known | fields))  # type: ignore[arg-type]


def left(of: JobView, *places: tuple[int, int], has_manifest: bool = False, view: ClusterView | None = None) -> list[
    tuple[int, int]
]:  # fmt: skip
    found = [BoundaryFolder(*place, has_manifest) for place in places]
    return [folder.place for folder in stale_checkpoints(view or ClusterView(jobs={"j": of}), of, found)]


def test_boundaries_that_a_plan_may_still_complete_stay() -> None:
    """60 of timeline 3 is the run's past and due; of 5 anything may come; of 6 this view has not heard yet."""
    places = ((1, 20), (3, 40), (3, 60), (5, 80), (6, 80))
    assert left(job(), *places) == left(job(), *places, has_manifest=True) == []


def test_rolled_back_and_overtaken_boundaries_are_stale() -> None:
    """80 of timeline 3 and all of 4 were given up, with a manifest or without; 30 is older than the checkpoint."""
    places = ((1, 40), (3, 30), (3, 80), (4, 20), (4, 80))
    assert left(job(), *places) == left(job(), *places, has_manifest=True) == list(places)


def test_a_cancelled_job_leaves_its_incomplete_boundary_stale() -> None:
    """It was cancelled while 80 was copied. A complete checkpoint stays; a failed or paused job may resume."""
    for phase, expected in ((Phase.CANCELLED, [(5, 80)]), (Phase.FAILED, []), (Phase.PAUSED, [])):
        of = job(plan=None, phase=PhaseRecord(phase=phase, lineage=PLAN.lineage))
        assert left(of, (5, 80)) == expected
        assert left(of, (5, 80), has_manifest=True) == []


def test_nothing_is_swept_for_a_job_without_a_known_past() -> None:
    """It has no plan yet, or its folder belongs to another job."""
    parents = CheckpointRecord(timeline=9, boundary=40, url="/parents/p/v/00000009-0000000040", origin_job="p")
    for checkpoint in (None, parents):
        assert left(job(plan=None, checkpoint=checkpoint), (3, 40)) == []
    assert left(job(submission=replace(job().submission, uid="")), (4, 20)) == []  # type: ignore[type-var]


def test_a_checkpoint_that_another_job_starts_from_stays() -> None:
    child = JobView(
        name="c", checkpoint=CheckpointRecord(timeline=4, boundary=80, url=url(4, 80, "/root/checkpoints/"))
    )
    of = job()
    view = ClusterView(jobs={"j": of, "c": child})
    assert left(of, (4, 80), (4, 20), view=view) == [(4, 20)]


def with_parts(*places: tuple[int, int]) -> JobView:
    """It runs on timeline 5; its checkpoint, 40 of timeline 3, names these journal parts."""
    parts = tuple(JournalPart(timeline=t, boundary=b, size_bytes=1, checksum="ab") for t, b in places)
    record = CheckpointRecord(timeline=3, boundary=40, url=url(3, 40), journal_parts=parts)
    return job(checkpoint=record)


def stale(of: JobView, *places: tuple[int, int], is_whole: bool = True, view: ClusterView | None = None) -> list[
    tuple[int, int]
]:  # fmt: skip
    found = [PartFile("any", place, is_whole=is_whole) for place in places]
    return [file.place for file in stale_parts(view or ClusterView(jobs={"j": of}), of, found)]


def test_parts_that_no_checkpoint_can_name_are_stale() -> None:
    """Named ones stay, and those of boundaries that are still to be completed; the rest was left or never named."""
    of = with_parts((1, 20))
    assert stale(of, (1, 20), (3, 60), (5, 80), (6, 80)) == []
    left_behind = ((1, 30), (3, 30), (3, 40), (3, 80), (4, 80))
    assert stale(of, *left_behind) == list(left_behind)


def test_partial_parts_are_stale_when_no_checkpoint_waits_for_them() -> None:
    """Of a named part, or of one that was left: a dead leader's. Of a later boundary: perhaps a living one's. Those
    that a job copies from its origin are needed until it has a checkpoint of its own."""
    of = with_parts((1, 20))
    assert stale(of, (1, 20), (3, 40), (3, 60), (5, 80), (6, 80), (3, 80), is_whole=False) == [
        (1, 20), (3, 40), (3, 80)
    ]  # fmt: skip
    assert of.checkpoint is not None
    child = replace(of, checkpoint=replace(of.checkpoint, origin_job="j"))
    assert stale(child, (1, 20), is_whole=False) == []


def test_parts_that_another_job_starts_with_stay() -> None:
    child = replace(with_parts((4, 20)), name="c")
    of = with_parts((1, 20))
    assert stale(of, (4, 20), (4, 30), view=ClusterView(jobs={"j": of, "c": child})) == [(4, 30)]


def test_left_parts_are_deleted_and_named_ones_are_not(tmp_path: Path) -> None:
    """A manifest that was given up leaves a part, and a dead leader a torn one; a living one may be at work."""
    folder = tmp_path / "checkpoints/j/u/journal"
    folder.mkdir(parents=True)
    dead, alive = (partial_name(part_name(*place), "0123abcd") for place in ((3, 40), (5, 60)))
    for name in (part_name(1, 20), part_name(3, 40), part_name(5, 80), dead, alive, "notes"):
        (folder / name).write_bytes(b"rows")
    view = ClusterView(jobs={"j": with_parts((1, 20))}, steady_since=0.0)
    asyncio.run(CheckpointSweep(view, is_leading=lambda: True, checkpoint_root=tmp_path).sweep())
    left_there = {path.name for path in folder.iterdir()}
    assert left_there == {part_name(1, 20), part_name(5, 80), alive, "notes"}


def test_an_unusual_error_of_a_driver_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no OSError: it is logged, and the next job follows."""
    asked: list[str] = []

    def listing(url: str) -> list[tuple[int, int, bool]]:
        asked.append(url)
        raise KeyError("no such bucket")

    monkeypatch.setattr("headway.daemon.leader.sweeps.list_boundaries", listing)
    view = ClusterView(jobs={"j": job(), "k": replace(job(), name="k")}, steady_since=0.0)
    asyncio.run(CheckpointSweep(view, is_leading=lambda: True, checkpoint_root=tmp_path).sweep())
    assert [url.rpartition("checkpoints/")[2] for url in asked] == ["j/u", "k/u"]


def test_only_the_leader_deletes_stale_folders(tmp_path: Path) -> None:
    """Only while etcd is reachable. A job that does not change is checked a few times only."""
    for place in ((3, 40), (3, 80), (5, 80)):
        folder = tmp_path / url(*place)
        folder.mkdir(parents=True)
        (folder / "embed.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints/j/u/notes").mkdir()
    of = job()
    view = ClusterView(jobs={"j": of})
    is_leading = False

    def folders() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints/j/u").iterdir())

    sweep = CheckpointSweep(view, is_leading=lambda: is_leading, checkpoint_root=tmp_path)
    before = folders()
    asyncio.run(sweep.sweep())
    is_leading = True
    asyncio.run(sweep.sweep())
    assert folders() == before, "etcd is out of sight"
    view.set_in_sight(True, now=0.0)
    asyncio.run(sweep.sweep())
    assert folders() == ["00000003-0000000040", "00000005-0000000080", "notes"]
    of.plan, of.phase = None, PhaseRecord(phase=Phase.PAUSED, lineage=PLAN.lineage)
    for _ in range(NUM_LOOKS):
        asyncio.run(sweep.sweep())
    (tmp_path / url(4, 20)).mkdir()
    asyncio.run(sweep.sweep())
    assert "00000004-0000000020" in folders()
    of.plan = PLAN
    asyncio.run(sweep.sweep())
    assert "00000004-0000000020" not in folders()


def test_a_late_manifest_of_a_swept_boundary_is_deleted_by_its_writer(tmp_path: Path) -> None:
    """Its job is over and its writer does not lead. The writer waits while etcd is unreachable."""
    of = job(plan=None, phase=PhaseRecord(phase=Phase.FINISHED, lineage=PLAN.lineage))
    view = ClusterView(jobs={"j": of})
    sweep = CheckpointSweep(view, is_leading=lambda: False, checkpoint_root=tmp_path)
    late, kept = tmp_path / url(3, 80), tmp_path / url(3, 40)
    for folder in (late, kept):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(b"{}")

    async def until_swept(*, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while late.exists():
                await asyncio.sleep(0.001)

    async def scenario() -> None:
        async with running(sweep.run()):
            sweep.wrote_late("j")
            with pytest.raises(TimeoutError):
                await until_swept(within_s=0.1)
            view.set_in_sight(True, now=0.0)
            sweep.wrote_late("gone")
            sweep.wrote_late("j")
            await until_swept(within_s=10.0)

    asyncio.run(scenario())
    assert kept.exists()


def test_a_late_write_in_an_unreadable_folder_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    def listing(url: str) -> list[tuple[int, int, bool]]:
        attempts.append(url)
        if len(attempts) == 1:
            raise OSError("away")
        return []

    monkeypatch.setattr("headway.daemon.leader.sweeps.list_boundaries", listing)
    view = ClusterView(jobs={"j": job()}, steady_since=0.0)
    sweep = CheckpointSweep(view, is_leading=lambda: False, checkpoint_root=tmp_path)
    sweep.wrote_late("j")
    for _ in range(3):
        asyncio.run(sweep.sweep())
    assert len(attempts) == 2


async def test_late_writes_do_not_delay_the_sweep_of_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come more often than the sweep."""
    monkeypatch.setattr("headway.daemon.leader.sweeps.SWEEP_PERIOD_S", 0.05)
    sweep = CheckpointSweep(ClusterView(), is_leading=lambda: True, checkpoint_root=None)
    swept: list[object] = []
    looked_at_all = asyncio.Event()

    async def look(names: object = None) -> None:
        swept.append(names)
        if names is None:
            looked_at_all.set()
        sweep.wrote_late("j")
        await asyncio.sleep(0)

    monkeypatch.setattr(sweep, "sweep", look)
    running = asyncio.create_task(sweep.run())
    sweep.wrote_late("j")
    try:
        await asyncio.wait_for(looked_at_all.wait(), 10.0)
    finally:
        running.cancel()
    assert {"j"} in swept
