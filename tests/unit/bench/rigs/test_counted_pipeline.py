"""A pipeline of one process with a worker on a device that is late: the same losses as without."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from memory import CASES, Case
from rigs.counted_pipeline import CountedPipeline

from headway.stages.model.determinism import configure
from tests.rigs.late_streams import late_device


def losses(case: Case, *, on_card: int) -> list[float]:
    """Of every batch. The device stands for a card: what was launched happens later, and unread memory is poisoned."""
    plan = case.plan()
    configure(case.spec.train, torch.device("cpu"))
    pipeline = CountedPipeline(
        case.spec, plan, as_worker=lambda _: nullcontext(), on_card=on_card, open_card=partial(late_device, 3)
    )
    pipeline.run()
    pipeline.close()
    return pipeline.losses


@pytest.mark.slow
def test_a_worker_on_a_late_device_changes_no_loss() -> None:
    """One replica of the first stage is alone on the device."""
    case = next(case for case in CASES if case.name == "replicas")
    expected = losses(case, on_card=-1)
    assert len(expected) == case.spec.train.batches
    assert losses(case, on_card=0) == expected
