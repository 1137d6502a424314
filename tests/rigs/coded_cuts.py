"""Parts that tests of coded cuts share."""

import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import reference
from headway.stages.links.codec import Codec
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import CountingTokens, Pipeline, initial_layers


def run(
    job: JobSpec,
    *,
    num_stages: int,
    codecs: list[Codec],
    replicas: tuple[int, ...] = (),
    late_seed: int | None = None,
) -> Pipeline:
    """The pipeline after its last batch; its first copies of the layers are in `layers`."""
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(
        job, layers, journal, num_stages=num_stages, codecs=codecs, replicas=replicas, late_seed=late_seed
    )
    assert set(pipeline.run()) == {job.train.batches}
    pipeline.copies.insert(0, layers)
    return pipeline


def assert_equals_reference(job: JobSpec, pipeline: Pipeline, codecs: list[Codec]) -> None:
    """Losses and weights, to the bit."""
    cuts = [layers[0] for layers, codec in zip(pipeline.slices[1:], codecs, strict=True) if codec]
    losses: list[float] = []
    tokens = CountingTokens()
    weights = reference(job, tokens, coded_cuts=cuts, on_batch=lambda row: losses.append(row.loss))  # type: ignore[arg-type]
    assert [row.loss for row in pipeline.journal.rows] == losses
    for name, layer in pipeline.copies[0].items():
        for parameter, tensor in weights[name].items():
            assert torch.equal(layer.weights()[parameter], tensor), f"{name}.{parameter}"
