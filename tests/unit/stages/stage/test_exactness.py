"""However the model is cut, the losses and weights are bit for bit those of the plain loop.

Each kind of job runs on a cut on the CPU, on another one on devices whose copies are late, and on all in a slow run.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.daemon.jobs.job import JobSpec
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.ids import Boundary
from headway.stages.schedule.operations import Backward, Forward, Update
from headway.stages.spec import RECOMPUTES, TIED, AdapterSpec, ModelSpec, layer_names, weight_version
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    MODEL,
    NARROW,
    Pipeline,
    SnapshotPlan,
    Trace,
    assert_exact,
    assert_replicas_agree,
    initial_layers,
    load_all,
    make_job,
    oracle_results,
    save_all,
    with_blocks,
    with_train,
)
from tests.rigs.pipeline import JOBS as PLAIN

TIED_MODEL = replace(MODEL, tie_word_embeddings=True)
WINDOWS = replace(MODEL, sliding_window=3, first_window_layer=1)
MIXTRAL = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
DOTS = replace(
    MIXTRAL, qk_norm=True, router_scoring="sigmoid", router_bias=True, num_shared_experts=1, routed_scaling_factor=1.5
)
EXPERT_TARGETS = AdapterSpec(rank=2, targets=("v_proj", "gate_proj", "up_proj", "down_proj"), quantize="nf4")
BIASED = replace(EF, router_bias_lr=0.05)
NARROW_EF = replace(EF, matrices=replace(EF.matrices, newton_schulz_dtype="bfloat16", momentum_dtype="bfloat16"))
MASK: dict[str, Any] = {"loss_mask": "data"}
SEPARATE: dict[str, Any] = {"loss_mask": "data", "documents": "separate"}
PAIRS: dict[str, Any] = {**SEPARATE, "objective": "dpo", "dpo_beta": 0.5}
ROUTED: dict[str, Any] = {"router_balance_loss": 0.05, "router_z_loss": 0.01}
GROUPS: dict[str, Any] = {"microbatches": 6, "reduction_groups": 3}
PUBLISHED: dict[str, Any] = {"adjust_lr": "match_rms_adamw", "newton_schulz_coefficients": "polar_express"}
MATRIX_ALONE = ("soap", "normuon", "lionmuon")


def adapted(model: ModelSpec = MODEL, **adapter: Any) -> ModelSpec:
    return replace(model, adapter=AdapterSpec(rank=2, **adapter))


def with_matrices(name: str, rest: str = "adamw", **settings: Any) -> OptimSpec:
    """Error Feedback around an optimizer of the matrices; SOAP turns its bases at every second update."""
    matrices = GroupSpec(name=name, precondition_frequency=2, **settings)
    return replace(EF, matrices=matrices, rest=GroupSpec(name=rest))


def job(optim: OptimSpec = EF, model: ModelSpec = MODEL, **train: Any) -> JobSpec:
    return make_job(with_train(**train), optim, model=model)


JOBS = {
    **{re.sub("[^a-z0-9]+", "-", name.lower()): plain for name, plain in PLAIN.items()},
    # numbers of microbatches whose inverse is rounded
    "3-microbatches": job(microbatches=3, batches=3),
    "5-microbatches-2-groups": job(microbatches=5, reduction_groups=2, batches=3),
    "7-microbatches-3-groups": job(microbatches=7, reduction_groups=3, batches=3),
    # many reduction groups
    "2bw-clip-4-groups": job(microbatches=8, reduction_groups=4, clip_norm=0.05),
    "2bw-narrow-3-groups": job(NARROW_EF, microbatches=7, reduction_groups=3, dtype="bfloat16"),
    "1f1b-adamw-3-groups": job(ADAMW, schedule="1f1b", microbatches=8, reduction_groups=3, clip_norm=0.0),
    "1f1b-clip-4-groups": job(schedule="1f1b", microbatches=8, reduction_groups=4, clip_norm=0.05),
    "gpipe-clip-3-groups": job(schedule="gpipe", microbatches=8, reduction_groups=3, clip_norm=0.05),
    # two batches without delay, then the others
    "2bw-sync-clip-4-groups": job(sync_batches=2, batches=5, microbatches=8, reduction_groups=4, clip_norm=0.05),
    "2bw-sync-narrow-bfloat16": job(NARROW_EF, sync_batches=2, batches=5, dtype="bfloat16"),
    "2bw-sync-1-microbatch": job(sync_batches=3, batches=6, microbatches=1),
    "2bw-sync-tied-evaluated": job(model=TIED_MODEL, sync_batches=2, batches=5, **GROUPS, eval_every=1),
    # the other optimizers, under Error Feedback
    **{f"2bw-{name}": job(with_matrices(name), batches=6, **GROUPS) for name in MATRIX_ALONE},
    **{f"2bw-{name}": job(with_matrices(name, rest=name), batches=6, **GROUPS) for name in ("adan", "mars")},
    "2bw-published-muon": job(with_matrices("muon", **PUBLISHED), batches=4, **GROUPS),
    "2bw-published-normuon-bfloat16": job(
        with_matrices("normuon", newton_schulz_dtype="bfloat16", **PUBLISHED), batches=4, dtype="bfloat16"
    ),
    "2bw-lionmuon-polar-express": job(with_matrices("lionmuon", newton_schulz_coefficients="polar_express"), batches=4),
    "2bw-narrow-bfloat16-soap": job(with_matrices("soap", momentum_dtype="bfloat16"), batches=6, dtype="bfloat16"),
    # a tied embedding
    "tied-2bw-clip": job(model=TIED_MODEL, **GROUPS, clip_norm=0.05),
    "tied-2bw-bfloat16": job(
        NARROW, TIED_MODEL, microbatches=5, reduction_groups=2, dtype="bfloat16", loss_chunk=5
    ),
    "tied-1f1b-no-clip": job(ADAMW, TIED_MODEL, schedule="1f1b", clip_norm=0.0),
    "tied-gpipe-clip": job(model=TIED_MODEL, schedule="gpipe", microbatches=4, reduction_groups=2, clip_norm=0.05),
    "tied-2bw-recomputed": job(model=TIED_MODEL, microbatches=4, reduction_groups=4, recompute="block"),
    # one product for the gradient of the vocabulary's matrix
    "one-product-2bw-bfloat16": job(dtype="bfloat16", loss_chunk=5, loss_gradient="whole"),
    "one-product-tied-1f1b": job(ADAMW, TIED_MODEL, schedule="1f1b", loss_chunk=5, loss_gradient="whole", eval_every=1),
    # a loss with a mask, one batch without any target
    "masked-3-groups": job(**MASK, microbatches=8, reduction_groups=3, batches=3),
    "masked-bfloat16-block-again": job(**MASK, dtype="bfloat16", loss_chunk=5, recompute="block"),
    "masked-1f1b-attention-again": job(ADAMW, **MASK, schedule="1f1b", recompute="attention"),
    "masked-gpipe-no-clip": job(ADAMW, **MASK, schedule="gpipe", clip_norm=0.0),
    "documents-attention-again": job(**SEPARATE, recompute="attention"),
    "documents-1f1b-block-again": job(**SEPARATE, schedule="1f1b", dtype="bfloat16", recompute="block"),
    "documents-windows-3-groups": job(model=WINDOWS, **SEPARATE, microbatches=5, reduction_groups=3),
    # preferences, one batch without any pair
    "pairs-3-groups": job(model=adapted(alpha=4.0), **PAIRS, microbatches=8, reduction_groups=3),
    "pairs-1f1b-chunks": job(
        ADAMW, adapted(alpha=4.0), **PAIRS, schedule="1f1b", loss_chunk=5, recompute="attention"
    ),
    "pairs-bfloat16-held-out": job(
        model=adapted(alpha=4.0), **PAIRS, dtype="bfloat16", recompute="block", eval_every=2
    ),
    "pairs-windows-tied": job(model=adapted(replace(WINDOWS, tie_word_embeddings=True), alpha=4.0), **PAIRS),
    # mixtures of experts
    "experts-groups": job(BIASED, DOTS, **GROUPS, **ROUTED, clip_norm=0.05),
    "elementwise-again": job(recompute="elementwise", reduction_groups=2),
    "elementwise-again-1f1b-bfloat16": job(ADAMW, schedule="1f1b", dtype="bfloat16", recompute="elementwise"),
    "experts-elementwise-again": job(BIASED, DOTS, recompute="elementwise", dtype="bfloat16", **ROUTED),
    "experts-recomputed": job(BIASED, DOTS, recompute="block", **ROUTED),
    "experts-1f1b-bfloat16": job(model=MIXTRAL, schedule="1f1b", dtype="bfloat16", loss_chunk=5, **ROUTED),
    "experts-tied-attention": job(
        model=replace(MIXTRAL, tie_word_embeddings=True), recompute="attention", **ROUTED
    ),
    # adapters: the embedding is frozen
    "adapter-2bw": job(model=adapted()),
    "adapter-1f1b-block-again": job(model=adapted(), schedule="1f1b", recompute="block"),
    "adapter-experts-nf4": job(
        model=replace(DOTS, adapter=EXPERT_TARGETS, router_bias=False), router_balance_loss=0.1
    ),
    **{
        f"adapter-{quantizer}-{again}": job(
            model=adapted(quantize=quantizer), recompute=again, dtype="bfloat16"
        )
        for quantizer in ("nf4", "int8")
        for again in RECOMPUTES
    },
    **{f"adapter-dropout-{again}": job(model=adapted(dropout=0.2), recompute=again) for again in RECOMPUTES},
    # evaluations beside the training
    "evaluated-2bw": job(eval_every=2, eval_microbatches=3, batches=5),
    "evaluated-documents-bfloat16": job(**SEPARATE, eval_every=1, dtype="bfloat16", loss_chunk=5),
    "evaluated-1f1b-recomputed": job(
        ADAMW, schedule="1f1b", eval_every=3, microbatches=7, reduction_groups=3, recompute="block"
    ),
    "evaluated-gpipe": job(schedule="gpipe", eval_every=2, recompute="attention"),
    "evaluated-4-groups": job(eval_every=2, eval_microbatches=5, microbatches=8, reduction_groups=4),
}  # fmt: skip
SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (1, 1, 1),
    (2, 2),
    (1,) * 5,
    (3, 2),
    (1, 1),
    (2, 1, 2),
    (1, 3, 1),
    (2,),
    (1, 2),
    (3,),
)
"""Workers of each stage."""
ALWAYS = {("tied-2bw-clip", (1, 1, 1), 1), ("evaluated-4-groups", (3, 2), 1)}
"""In a quick run too."""


def cases() -> Iterator[object]:
    """Each job on a cut, and on late devices on another one; on all cuts and several seeds in a slow run."""
    for number, (name, each) in enumerate(JOBS.items()):
        shapes = [shape for shape in SHAPES if max(shape) <= each.train.reduction_groups]
        picked = [(shapes[(number + step) % len(shapes)], late) for step, late in ((0, None), (1, 1))]
        for shape in shapes:
            for late_seed in (None, 1, 2, 3):
                is_quick = (shape, late_seed) in picked or (name, shape, late_seed) in ALWAYS
                words = [name, *map(str, shape), *([] if late_seed is None else [f"late{late_seed}"])]
                yield pytest.param(
                    name, shape, late_seed, id="-".join(words), marks=() if is_quick else pytest.mark.slow
                )


@pytest.mark.parametrize(("name", "shape", "late_seed"), [*cases()])
def test_any_cut_gives_the_bits_of_the_plain_loop(name: str, shape: tuple[int, ...], late_seed: int | None) -> None:
    """A job on a cut → the losses and weights of the reference, on each worker of a stage, also with shared updates."""
    job = JOBS[name]
    for shares_updates in {False, len(shape) > 1 and max(shape) > 1}:
        layers, journal = initial_layers(job), Journal()
        pipeline = Pipeline(
            job,
            layers,
            journal,
            num_stages=len(shape),
            replicas=shape,
            late_seed=late_seed,
            shares_updates=shares_updates,
        )
        assert pipeline.run() == [job.train.batches] * sum(shape)
        assert_exact(job, layers, journal)
        assert_replicas_agree(pipeline, layers)
        if job.model.trains_tie:
            embed, head = (layers[layer].weights()[parameter] for layer, parameter in TIED.items())
            assert torch.equal(embed, head)
            assert not torch.equal(embed, initial_layers(job)["embed"].weights()["weight"])
    if job.train.eval_every:
        told = [result.batch for result in oracle_results(job)[0] if result.eval_loss is not None]
        assert told == list(range(0, job.train.batches, job.train.eval_every))


STOPS = [
    ("2bw-muon-ef", (1, 1, 1), (1, 1), None, True),
    ("2bw-muon-ef", (1, 1, 1), (1, 1), None, False),
    ("2bw-muon-ef", (1, 1, 1), (1, 1), 0, False),
    ("2bw-bfloat16", (1,), (1,) * 5, None, True),
    ("2bw-narrow-optimizer-bfloat16", (1, 1), (1, 1, 1), None, False),
    ("1f1b-adamw-no-clip", (1,) * 5, (1,), None, True),
    ("2bw-clip-4-groups", (3, 1), (1, 2, 1), None, True),
    ("1f1b-clip-4-groups", (1,), (2, 2), None, True),
    ("gpipe-clip-3-groups", (2, 1, 2), (3,), None, True),
    ("tied-2bw-clip", (1, 1, 1), (1, 1), None, True),
    ("experts-groups", (1, 1, 1), (1, 1), None, True),
    ("2bw-sync-clip-4-groups", (3, 1), (1, 2, 1), None, True),
    ("2bw-sync-tied-evaluated", (1, 1, 1), (1, 1), 0, False),
]


@pytest.mark.parametrize(("name", "before", "after", "late_seed", "through_files"), STOPS)
def test_a_stop_and_another_cut_lose_nothing(
    tmp_path: Path,
    name: str,
    before: tuple[int, ...],
    after: tuple[int, ...],
    late_seed: int | None,
    through_files: bool,
) -> None:
    """The lead of the first stage chooses where all stop; another cut goes on, files or live state → equal bits."""
    job = replace(JOBS[name], train=replace(JOBS[name].train, batches=8))
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(
        job, layers, journal, num_stages=len(before), replicas=before, stop_after_batch=1, late_seed=late_seed
    )
    assert set(first.run()) == {first.stop}
    assert_replicas_agree(first, layers)
    boundary = first.stop
    assert boundary is not None
    assert 2 <= boundary < 8
    assert journal.rows[-1].batch + 1 == boundary
    if through_files:
        assert save_all(tmp_path, job, layers, journal) == boundary
        layers, journal = load_all(tmp_path, job, boundary)
    second = Pipeline(
        job,
        layers,
        journal,
        num_stages=len(after),
        replicas=after,
        more_layers=lambda: load_all(tmp_path, job, boundary)[0],
        generation=2,
        late_seed=late_seed,
    )
    second.run()
    assert_exact(job, layers, journal)
    assert_replicas_agree(second, layers)
    assert [row.generation for row in journal.rows] == [1] * boundary + [2] * (8 - boundary)


INSIDE = ((1, 1), (1, 1, 1), (1,) * 5, (2, 2), (1, 3, 1), (1,), (3, 1, 2))
"""Workers of each stage. Of eight layers, every one but (1,) ends a stage between the halves of a block."""


CUT_INSIDE = {
    "2bw-clip-4-groups": (3, 1, 2),
    "2bw-bfloat16": (1, 1, 1),
    "1f1b-adamw-no-clip": (1,) * 5,
    "2bw-recomputation": (1, 1),
    "tied-2bw-recomputed": (1, 3, 1),
    "documents-attention-again": (1, 1, 1),
    "pairs-bfloat16-held-out": (1, 1),
    "experts-groups": (1,) * 5,
    "elementwise-again": (2, 2),
    "adapter-experts-nf4": (1, 1, 1),
    "adapter-dropout-block": (1,) * 5,
}
"""The cuts of a quick run."""


def cases_inside() -> Iterator[object]:
    """Each job on all cuts; on some in a quick run."""
    for name, each in JOBS.items():
        shapes = [shape for shape in INSIDE if max(shape) <= each.train.reduction_groups]
        for shape in shapes:
            marks = () if shape == CUT_INSIDE.get(name) else pytest.mark.slow
            yield pytest.param(name, shape, id="-".join((name, *map(str, shape))), marks=marks)


@pytest.mark.parametrize(("name", "shape"), [*cases_inside()])
def test_a_cut_inside_blocks_gives_the_bits_of_the_plain_loop(name: str, shape: tuple[int, ...]) -> None:
    """A job on stages that begin and end with half a block → losses, norms and weights of the reference."""
    job = with_blocks(JOBS[name], are_split=True)
    layers, journal = initial_layers(job), Journal()
    is_late = len(shape) % 2 == 1
    pipeline = Pipeline(job, layers, journal, num_stages=len(shape), replicas=shape, late_seed=1 if is_late else None)
    assert len(shape) == 1 or any(each[0].endswith(".mlp") for each in pipeline.slices)
    assert pipeline.run() == [job.train.batches] * sum(shape)
    assert_exact(job, layers, journal)
    assert_replicas_agree(pipeline, layers)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_stop_and_another_cut_of_halves_lose_nothing(tmp_path: Path, recompute: str) -> None:
    """Whole blocks on each stage, a stop, files, and then a stage for each half → the bits of the plain loop."""
    job = make_job(with_train(batches=6, recompute=recompute), model=replace(MODEL, num_hidden_layers=1))
    job = with_blocks(job, are_split=True)
    assert job.layers == ("embed", "block.0.attention", "block.0.mlp", "head")
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=1, stop_after_batch=1)
    first.run()
    boundary = save_all(tmp_path, job, layers, journal)
    assert 2 <= boundary < 6
    layers, journal = load_all(tmp_path, job, boundary)
    Pipeline(job, layers, journal, num_stages=4, generation=2).run()
    assert_exact(job, layers, journal)


def test_stopping_at_every_batch_loses_nothing(tmp_path: Path) -> None:
    """A stop after each batch, each time another cut from files, boundary 0 included → the same bits."""
    job = make_job(with_train(batches=4), EF)
    layers, journal = initial_layers(job), Journal()
    boundary = save_all(tmp_path, job, layers, journal)
    num_stages = 0
    while boundary < 4:
        layers, journal = load_all(tmp_path, job, boundary)
        num_stages = num_stages % 5 + 1
        Pipeline(job, layers, journal, num_stages=num_stages, stop_after_batch=boundary).run()
        reached = save_all(tmp_path, job, layers, journal)
        assert reached > boundary
        boundary = reached
    assert_exact(job, layers, journal)


@pytest.mark.parametrize("name", ["2bw-sync-clip-4-groups", "2bw-sync-narrow-bfloat16", "2bw-sync-1-microbatch"])
def test_a_cut_at_any_boundary_around_the_seam_loses_nothing(tmp_path: Path, name: str) -> None:
    """Stopped before, at and after batch k, or rolled back there to what a failure leaves, the snapshots of a run, and
    cut anew → the same bits. A boundary has W_{b−1} where batch b is computed on it, and always Error Feedback's δ."""
    job = JOBS[name]
    k, batches, groups = job.train.sync_batches, job.train.batches, job.train.reduction_groups
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=3, snapshots=SnapshotPlan(tmp_path / "kept")).run()
    for boundary in range(1, batches):
        folder = tmp_path / str(boundary)
        folder.mkdir()
        layers, journal = initial_layers(job), Journal()
        shape = ((1, 1, 1, 1), (min(2, groups), 1), (1,))[boundary % 3]
        first = Pipeline(job, layers, journal, num_stages=len(shape), replicas=shape)
        first.stop_all_at(boundary)
        assert set(first.run()) == {boundary}
        save_all(folder, job, layers, journal)
        for source in (folder, tmp_path / "kept" / str(boundary)):
            layers, journal = load_all(source, job, Boundary(boundary))
            kept = {key.rpartition("/")[0] for key in layers["head"].tensors()}
            assert ("previous" in kept) == (boundary > k)
            assert "optim/error_feedback" in kept
            Pipeline(job, layers, journal, num_stages=2 + boundary % 3, generation=2).run()
            assert_exact(job, layers, journal)


def test_a_trace_shows_a_delay_of_exactly_one() -> None:
    """2bw on three stages: each microbatch once forward and once backward on W_v(b), at most two versions alive."""
    job = make_job(with_train(batches=5), EF)
    traces = [Trace() for _ in range(3)]
    Pipeline(job, initial_layers(job), Journal(), num_stages=3, observers=traces).run()
    every = {(b, i) for b in range(5) for i in range(job.train.microbatches)}
    for trace in traces:
        for kind in (Forward, Backward):
            done = [(op.batch, op.microbatch) for op, _, _ in trace.ops if isinstance(op, kind)]
            assert sorted(done) == sorted(every)
        for op, version, num_versions_live in trace.ops:
            assert version == (op.batch if isinstance(op, Update) else weight_version(op.batch, 1))
            assert num_versions_live <= 2
    # A stage that has done a batch before it hears the norm of the one before never holds both versions.
    assert max(alive for trace in traces for _, _, alive in trace.ops) == 2


def test_stages_report_the_boundary_they_started_from_when_stopped_at_once() -> None:
    """A stop is asked for before anything has run → boundary 0, and nothing has changed."""
    job = make_job(with_train(), EF)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=2)
    pipeline.inboxes[0].put("choose")
    assert pipeline.run() == [Boundary(0)] * 2
    assert len(journal) == 0
    again = initial_layers(job)
    for name, layer in layers.items():
        for parameter, tensor in again[name].weights().items():
            assert torch.equal(layer.weights()[parameter], tensor)


def test_the_state_of_both_copies_of_a_tied_embedding_is_equal() -> None:
    """Momentum, variance and Error Feedback too: what is moved with either end goes on alike."""
    job = JOBS["tied-2bw-clip"]
    layers = initial_layers(job)
    Pipeline(job, layers, Journal(), num_stages=3).run()
    of_embed, of_head = layers["embed"].tensors(), layers["head"].tensors()
    tied = {key for key in of_embed if key.endswith("/weight")}
    assert len(tied) >= 5
    for key in tied:
        assert torch.equal(of_embed[key], of_head[key.removesuffix("weight") + TIED["head"]]), key


def test_halves_lie_in_the_order_of_their_blocks() -> None:
    """Whole names are as they were, and each block has its attention before its MLP."""
    model = replace(MODEL, num_hidden_layers=2)
    assert layer_names(model) == ("embed", "block.0", "block.1", "head")
    halves = ("block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp")
    assert layer_names(model, are_split=True) == ("embed", *halves, "head")
