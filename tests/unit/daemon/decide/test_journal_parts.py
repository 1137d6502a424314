"""Old rows of the journal: which checkpoint closes a part, and what each manifest names."""

from dataclasses import replace
from itertools import pairwise

import pytest

from headway.daemon.blobs.checkpoint_names import folder_name, part_name, place_of_part
from headway.daemon.cluster.lineage import (
    GROWTH,
    MAX_PARTS,
    MIN_ROWS,
    JournalPart,
    Lineage,
    end_of,
    own_parts,
    with_next_part,
)
from headway.daemon.cluster.records import CheckpointRecord, Phase
from headway.daemon.decide.actions import parts_to_copy
from headway.daemon.decide.admission import why_no_checkpoint
from headway.daemon.decide.commands import CopyPart
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.worker.goal import WorkerStatus
from headway.stages.spec import ModelSpec
from headway.stages.state.file_digest import FileDigest
from tests.rigs.agent_views import LAYERS, goal_by, job, node, now, plan, view_of, worker
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

JOURNAL_FILE = FileDigest(size_bytes=10, checksum="ab")


def part(timeline: int, boundary: int) -> JournalPart:
    return JournalPart(timeline=timeline, boundary=boundary, size_bytes=10, checksum="ab")


def test_a_part_is_closed_when_it_has_enough_rows() -> None:
    """One row too few: the rows stay. Then the checkpoint's own journal is the next part."""
    first = with_next_part((), JOURNAL_FILE, timeline=1, boundary=MIN_ROWS)
    assert first == (part(1, MIN_ROWS),)
    assert with_next_part(first, JOURNAL_FILE, timeline=2, boundary=2 * MIN_ROWS - 1) == first
    assert with_next_part(first, JOURNAL_FILE, timeline=2, boundary=2 * MIN_ROWS) == (*first, part(2, 2 * MIN_ROWS))


def test_the_longest_run_has_few_parts() -> None:
    """2^31 batches with a checkpoint at every possible part: the list stays within its limit."""
    parts: tuple[JournalPart, ...] = ()
    while (boundary := end_of(parts) + max(MIN_ROWS, end_of(parts) // GROWTH)) < 2**31:
        parts = with_next_part(parts, JOURNAL_FILE, timeline=1, boundary=boundary)
        assert end_of(parts) == boundary
    assert 1000 < len(parts) < 2600 < MAX_PARTS


def test_parts_of_a_timeline_that_was_left_are_not_used() -> None:
    """The run went back from timeline 1 at boundary 50: what timeline 1 closed later is not its past."""
    lineage = Lineage(timeline=3, ancestry=((1, 50),))
    assert own_parts([part(1, 40), part(1, 60), part(3, 80)], lineage) == (part(1, 40), part(3, 80))


def test_parts_of_a_parent_count_under_its_numbers() -> None:
    """The parent's timelines mean nothing here, and no rollback goes back before the job's start."""
    inherited = replace(part(1, 60), is_inherited=True)
    assert own_parts([inherited, part(2, 80)], Lineage(timeline=3)) == (inherited,)


def test_a_part_has_a_name_that_reads_back() -> None:
    """Other files of the folder are none."""
    assert place_of_part(part_name(3, 2048)) == (3, 2048)
    assert [place_of_part(name) for name in (folder_name(3, 2048), ".00000003-0000002048.safetensors.x", "a.b")] == [
        None,
        None,
        None,
    ]


def test_checkpoints_close_parts_and_carry_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at every 20 batches, a part of at least 40: each manifest names those before it, and copies its own.

    Each part is copied once, before the manifest that names it; the last record has them all.
    """
    monkeypatch.setattr("headway.daemon.cluster.lineage.MIN_ROWS", 40)
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    fault = FaultSpec(copies=1, snapshot_every=20, checkpoint_every=20, checkpoints_kept=2)
    cluster.submit(small_spec("first", batches=130, fault=fault))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED)
    record = cluster.truth().jobs["first"].checkpoint
    assert record is not None
    ends = [each.boundary for each in record.journal_parts]
    assert ends[:2] == [40, 80]
    assert all(after - before >= 40 for before, after in pairwise(ends))
    assert sorted(cluster.copied_parts) == sorted({*cluster.copied_parts}), "a part was copied twice"
    assert len(cluster.copied_parts) == len(ends)


def test_a_job_that_starts_from_anothers_checkpoint_brings_its_parts() -> None:
    """The first manifest copies the parent's parts from next to the parent's checkpoint; the second copies none."""
    parent = CheckpointRecord(
        timeline=1, boundary=50, url="/moved/b", journal_parts=(part(1, 40),), origin_job="parent"
    )
    parts = (*parent.journal_parts, part(2, 90))
    first = CheckpointRecord(timeline=2, boundary=90, url="c/j/u/b", journal_parts=parts)
    own = CopyPart(source="c/j/u/b/journal.safetensors", target=f"c/j/u/journal/{part_name(2, 90)}")
    assert parts_to_copy(parent, first) == (
        CopyPart(
            source=f"/moved/journal/{part_name(1, 40)}",
            target=f"c/j/u/journal/{part_name(1, 40)}",
            is_inherited=True,
        ),
        own,
    )
    assert parts_to_copy(replace(first, boundary=60, journal_parts=parent.journal_parts), first) == (own,)
    assert parts_to_copy(first, replace(first, boundary=95)) == ()


def test_the_worker_with_the_journal_is_told_of_each_part() -> None:
    """Only of this job's own parts, only while it runs, and only the lead of the last stage."""
    running = worker(prepared=1, started=1, layers=LAYERS, has_journal=True)
    own = CheckpointRecord(timeline=1, boundary=4096, url="u", journal_parts=(part(1, 2048), part(9, 4096)))
    of = job(plan=plan(1, ("a", LAYERS)), checkpoint=own)

    def told(of: JobView = of, status: WorkerStatus = running) -> int:
        return goal_by(view_of(of), node(status)).journal_from

    assert told() == 2048, "timeline 9 was left"
    assert told(status=now(running, has_journal=False)) == 0
    assert told(status=worker(prepared=1)) == 0
    assert told(replace(of, checkpoint=replace(own, origin_job="parent"))) == 0
    assert told(replace(of, checkpoint=None)) == 0


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ((part(1, 40), part(1, 40)), "out of order"),
        ((part(1, 120),), "out of order"),
        ((part(-1, 40),), "impossible timeline"),
        ((replace(part(1, 40), checksum="../x"),), "impossible timeline, size or checksum"),
        (tuple(part(1, end) for end in range(1, MAX_PARTS + 2)), "more than"),
    ],
)
def test_a_manifest_with_an_impossible_list_is_refused(parts: tuple[JournalPart, ...], fault: str) -> None:
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1))
    record = CheckpointRecord(timeline=1, boundary=100, url="u", journal_parts=parts)
    assert fault in why_no_checkpoint(record, spec, job="j", generation=1)
    assert not why_no_checkpoint(replace(record, journal_parts=(part(1, 100),)), spec, job="j", generation=1)
