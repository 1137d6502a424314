"""A row of the journal as the message that workers and daemons send."""

from headway.proto.control_pb2 import JournalEntry
from headway.stages.state.journal import JournalRow


def journal_entry(row: JournalRow) -> JournalEntry:
    """Return the message of a batch that the last stage has finished."""
    return JournalEntry(
        batch=row.batch,
        loss=row.loss,
        tokens=row.tokens,
        seconds=row.seconds,
        generation=row.generation,
        microbatch_losses=row.microbatch_losses,
        eval_loss=row.eval_loss,
    )
