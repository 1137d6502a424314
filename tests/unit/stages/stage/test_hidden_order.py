"""What equal bits at the end do not show: scaling by a power of two is exact, and rounding hides most of a norm."""

from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.stages.ids import LayerName
from headway.stages.links.link import Frame, FrameKind
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.state.journal import Journal
from tests.rigs.local_link import LocalLink
from tests.rigs.pipeline import (
    ADAMW,
    CountingTokens,
    Pipeline,
    Trace,
    initial_layers,
    make_job,
    with_train,
)


def first_gradient(job: JobSpec) -> dict[str, dict[str, Tensor]]:
    """g_0 by layer and parameter: the whole model in one graph, microbatches in order, then the factor 1/m."""
    weights = {name: initial_parameters(LayerName(name), job.model, seed=job.job.seed) for name in job.layers}
    modules = {name: build_layer(LayerName(name), job.model) for name in job.layers}
    for name, module in modules.items():
        module.load_state_dict(weights[name], assign=True)
    leaves = {name: dict(module.requires_grad_().named_parameters()) for name, module in modules.items()}
    for i in range(job.train.microbatches):
        rows = CountingTokens().microbatch(job.train, seed=job.job.seed, batch=0, microbatch=i)
        hidden = rows.inputs
        for module in modules.values():
            hidden = module(hidden)
        token_loss(hidden, rows.targets).backward()  # type: ignore[no-untyped-call]
    factor = torch.tensor(1 / job.train.microbatches, dtype=torch.float32)
    gradients: dict[str, dict[str, Tensor]] = {}
    for name, parameters in leaves.items():
        gradients[name] = {}
        for parameter, leaf in parameters.items():
            assert leaf.grad is not None
            gradients[name][parameter] = leaf.grad * factor
    return gradients


def test_squares_travel_from_the_last_layer_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages → each sends those below and then its own, last layer first; the total is their left fold."""
    job = make_job(with_train(microbatches=3, batches=1), ADAMW)
    expected = []
    for gradients in reversed(first_gradient(job).values()):
        expected.append(reduce(add, [gradients[name].double().square().sum().item() for name in sorted(gradients)]))
    squares: dict[str, list[float]] = {}
    totals: list[float] = []
    send = LocalLink.send

    def record(link: LocalLink, frame: Frame) -> None:
        if frame.kind is FrameKind.NORM_SQUARES:
            squares[link.peer] = frame.tensors[0].tolist()
        if frame.kind is FrameKind.NORM_TOTAL:
            totals.append(frame.tensors[0].item())
        send(link, frame)

    monkeypatch.setattr(LocalLink, "send", record)
    Pipeline(job, initial_layers(job), Journal(), num_stages=3).run()
    assert squares == {"stage 1": expected[:2], "stage 0": expected[:4]}
    assert totals == [reduce(add, expected)] * 2
    assert len(expected) == 5


def test_gpipe_begins_no_backward_before_all_forwards_of_the_batch() -> None:
    """gpipe on two stages → the last one does every forward of a batch, then every backward, then the update."""
    job = make_job(with_train(schedule="gpipe", batches=2, microbatches=3), ADAMW)
    traces = [Trace(), Trace()]
    Pipeline(job, initial_layers(job), Journal(), num_stages=2, observers=traces).run()
    of_batches = [f"F{b}.0 F{b}.1 F{b}.2 B{b}.0 B{b}.1 B{b}.2 U{b}" for b in (0, 1)]
    assert " ".join(str(op) for op, _, _ in traces[1].ops) == " ".join(of_batches)
