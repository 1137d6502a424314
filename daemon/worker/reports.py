"""What a worker tells its daemon of batches and snapshots, as messages. Pure."""

from headway.proto.control_pb2 import JournalEntry, Report, SnapshotMissed, Wrote
from headway.stages.journal import JournalRow
from headway.stages.snapshot_writer import SnapshotEnded


def journal_entry(row: JournalRow) -> JournalEntry:
    """A batch that the last stage has finished."""
    return JournalEntry(
        batch=row.batch,
        loss=row.loss,
        tokens=row.tokens,
        seconds=row.seconds,
        generation=row.generation,
        microbatch_losses=row.microbatch_losses,
    )


def snapshot_written(item: SnapshotEnded) -> Report:
    """All files of a boundary are in place."""
    wrote = Wrote(
        job=item.job, generation=item.generation, boundary=item.boundary, timeline=item.timeline, is_snapshot=True
    )
    for layer, file in item.files.items():
        wrote.files.add(layer=layer, path=str(file.path), size_bytes=file.size_bytes, checksum=file.checksum)
    return Report(wrote=wrote)


def snapshot_missed(item: SnapshotEnded, *, reason: str, factor: int) -> Report:
    """A snapshot that was not written; or one that was, so late that only every factor-th follows."""
    missed = SnapshotMissed(
        job=item.job,
        generation=item.generation,
        boundary=item.boundary,
        reason=reason,
        factor=factor,
        written=not item.trouble,
    )
    return Report(snapshot_missed=missed)
