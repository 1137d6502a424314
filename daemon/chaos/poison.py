"""Records that a cluster must survive: jobs that break rules of `submit`, and unreadable bytes."""

from dataclasses import replace
from typing import Final

from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import SpecRecord

NUM_HUGE_LAYERS: Final = 50_000_000
GARBAGE: Final = b'\xff\xfe{"spec": '


def poison(number: int, name: str, submission: SpecRecord) -> tuple[str, str, bytes]:
    """Return (description, key, value) of the poison with this number, counted off among the kinds.

    submission: of a healthy job, which the poisoned one resembles.
    """
    spec = submission.spec
    named = replace(spec, job=replace(spec.job, name=name))
    headless = replace(named, model=replace(spec.model, num_attention_heads=0))
    huge = replace(named, model=replace(spec.model, num_hidden_layers=NUM_HUGE_LAYERS))
    record = replace(submission, uid=f"{name}-uid")
    kinds = (
        ("a job without attention heads", Keys.of(name, "spec"), encode(replace(record, spec=headless))),
        (f"a job of {NUM_HUGE_LAYERS} layers", Keys.of(name, "spec"), encode(replace(record, spec=huge))),
        ("an unreadable job", Keys.of(name, "spec"), GARBAGE),
        ("an unreadable node", Keys.node(name), GARBAGE),
    )
    return kinds[number % len(kinds)]
