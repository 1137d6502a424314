"""One worker's part in ending a job early: the last stage judges evaluations, and the judgement goes upstream.

Only the leads of two stages talk about it; each lead tells its siblings.
"""

import torch

from headway.stages.early_stop import EvaluationTally
from headway.stages.ids import Batch
from headway.stages.links.link import FrameKind
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.stage.context import StageContext
from headway.stages.stage.replicas import Siblings
from headway.stages.stage.stage_links import StageLinks


class EndRelay:
    """Tells the schedule's state the job's last boundary. Does nothing in a job that no evaluation can end."""

    def __init__(
        self, context: StageContext, *, state: ScheduleState, links: StageLinks, siblings: Siblings | None
    ) -> None:
        self._context = context
        self._state = state
        self._links = links
        self._siblings = siblings
        self._best_batch: int | None = None

    @property
    def best_batch(self) -> Batch | None:
        """Return the best evaluation's batch if the job ends here, before its last batch; None: it does not."""
        is_early = self._state.version == self._state.end < self._context.train.batches
        return Batch(self._best_batch) if is_early and self._best_batch is not None else None

    def expects(self, batch: int) -> bool:
        """Return whether a judgement would be the next one, and another worker makes it."""
        has_sender = not (self._context.is_last and self._context.is_lead)
        return has_sender and self._state.expects_judgement(batch)

    def began(self, tally: EvaluationTally) -> None:
        """Tell what the journal has said before the run; the lead of the last stage does. What the run begins beyond
        needs no words.
        """
        every = self._state.schedule.judged_every
        newest = (self._context.boundary - 1) // every * every if every else -1
        if newest >= self._state.first_unjudged:
            self.judged(newest, tally)

    def judged(self, batch: int, tally: EvaluationTally) -> None:
        """An evaluation is in the journal, and decides with all before it."""
        self.arrived(batch, end=tally.end or self._context.train.batches, best_batch=tally.best_batch)

    def arrived(self, batch: int, *, end: int, best_batch: int) -> None:
        """A judgement is known. A lead passes it on. Raises ValueError for an end that this stage is past."""
        self._state.judged(batch, end)
        self._best_batch = best_batch
        if not self._context.is_lead:
            return
        frame = self._context.frame(FrameKind.JOB_END, batch, 0, torch.tensor([end, best_batch]))
        if self._links.upstream_lead is not None:
            self._links.upstream_lead.send(frame)
        if self._siblings is not None:
            self._siblings.send_to_all(frame)
