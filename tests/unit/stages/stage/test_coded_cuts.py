"""A pipeline whose links are coded has the bits of the plain loop with the same codec at the same cuts."""

import pytest

from headway.optim.spec import OptimSpec
from headway.stages.links.codec import Codec, codec_between
from tests.rigs.coded_cuts import assert_equals_reference, run
from tests.rigs.pipeline import ADAMW, EF, make_job, with_train


@pytest.mark.parametrize(
    ("schedule", "dtype", "wire", "groups", "optim", "feedback"),
    [
        ("2bw", "float32", "int8", 1, EF, True),
        ("2bw", "float32", "int8", 3, ADAMW, False),
        ("2bw", "bfloat16", "int8", 2, EF, True),
        ("1f1b", "float32", "bf16", 1, EF, True),
        ("gpipe", "float32", "int8", 2, ADAMW, True),
    ],
)
def test_coded_cuts_have_the_bits_of_the_coded_loop(
    schedule: str, dtype: str, wire: str, groups: int, optim: OptimSpec, feedback: bool
) -> None:
    """Three stages, both cuts coded, over every schedule → the reference with the codec at these cuts."""
    train = with_train(
        batches=3, schedule=schedule, dtype=dtype, wire=wire, reduction_groups=groups, wire_feedback=feedback
    )
    job = make_job(train, optim)
    codecs = [codec_between(train, is_between_sites=True)] * 2
    assert_equals_reference(job, run(job, num_stages=3, codecs=codecs), codecs)


def test_one_coded_cut_of_two() -> None:
    """Three stages of which only the last two are far from each other → only that cut rounds."""
    job = make_job(with_train(batches=3, wire="int8"), EF)
    codecs = [Codec.NONE, Codec.INT8]
    assert_equals_reference(job, run(job, num_stages=3, codecs=codecs), codecs)


@pytest.mark.parametrize("replicas", [(1, 2), (3, 1, 2)])
def test_replicas_change_no_bit_of_a_coded_run(replicas: tuple[int, ...]) -> None:
    """Three groups on any number of workers of a stage → feedback goes with the group, so the bits are the same."""
    job = make_job(with_train(wire="int8", microbatches=6, reduction_groups=3, batches=3), EF)
    codecs = [Codec.INT8] * (len(replicas) - 1)
    assert_equals_reference(job, run(job, num_stages=len(replicas), codecs=codecs, replicas=replicas), codecs)


def test_every_codec_makes_a_difference() -> None:
    """The same job with each codec, and with and without feedback → other bits: no switch is a decoration."""
    curves = set()
    for wire, feedback in (("none", True), ("bf16", True), ("int8", True), ("int8", False)):
        train = with_train(batches=3, wire=wire, wire_feedback=feedback)
        codecs = [codec_between(train, is_between_sites=True)]
        pipeline = run(make_job(train, EF), num_stages=2, codecs=codecs)
        curves.add(tuple(row.loss for row in pipeline.journal.rows))
    assert len(curves) == 4
