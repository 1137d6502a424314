"""Compiled layers: their own arithmetic, the same in the plain loop and on any cut; and what a machine without a
compiler says."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.errors import CompilationError
from headway.stages.model import compilation
from headway.stages.model.compilation import compile_ahead, compile_layer
from headway.stages.model.decoder import Block, build_layer
from headway.stages.model.determinism import configure
from headway.stages.spec import ModelSpec, Recompute
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    DOCUMENTS,
    EF,
    HYBRID,
    LONG,
    MODEL,
    TRAIN,
    Pipeline,
    assert_exact,
    initial_layers,
    make_job,
    with_train,
)

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled before, and nothing is left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "_compiled_for", None)
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_compiler
@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (MODEL, {"eval_every": 2, "loss_chunk": 5}),
        (MODEL, {"dtype": "bfloat16", "recompute": "block"}),
        (replace(MODEL, sliding_window=3, first_window_layer=1, no_rope_layer_interval=3), {"microbatch_size": 1}),
        (HYBRID, {"dtype": "bfloat16", "recompute": "block", **LONG, **DOCUMENTS}),
    ],
)
def test_compiled_layers_have_the_bits_of_the_compiled_loop_on_any_cut(
    model: ModelSpec, changes: dict[str, object]
) -> None:
    """One to five stages, every graph kept or the blocks' computed again → the losses and weights of the reference,
    with one compilation of each kind of layer, all of them ahead."""
    job = make_job(with_train(compile=True, batches=3, **changes), EF, model=model)
    configure(job.train, CPU)
    compile_ahead(job.layers, job.model, job.train, CPU)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_stages in (1, 2, 5):
            layers, journal = initial_layers(job), Journal()
            Pipeline(job, layers, journal, num_stages=num_stages).run()
            assert_exact(job, layers, journal)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(
    "compiler",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(300), needs_compiler])],
)
def test_no_choice_of_what_is_computed_again_changes_a_bit_of_compiled_layers(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice on a stage, chunks of the loss with a smaller last one → the reference, with one code for all."""
    monkeypatch.setattr(compilation, "_WHOLE", compilation._WHOLE | {"backend": compiler})
    job = make_job(with_train(compile=True, recompute="auto", dtype="bfloat16", loss_chunk=5, batches=2), EF)
    assert job.train.recomputes == ("elementwise", "attention", "block")
    configure(job.train, CPU)
    compile_ahead(job.layers, job.model, job.train, CPU)
    with torch.compiler.set_stance("fail_on_recompile"):
        for recompute in (("none", "elementwise", "attention"), ("attention", "block", "none")):
            layers, journal = initial_layers(job), Journal()
            Pipeline(job, layers, journal, num_stages=3, recompute=recompute).run()
            assert_exact(job, layers, journal)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("recompute", ["elementwise", "attention"])
def test_a_compiled_block_keeps_what_plans_count(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the partition of torch's compiler leaves for the backward, in bfloat16, is within 2 % of the estimate."""
    monkeypatch.setattr(compilation, "_WHOLE", compilation._WHOLE | {"backend": "aot_eager_decomp_partition"})
    model = replace(MODEL, hidden_size=64, intermediate_size=192)
    train = replace(TRAIN, compile=True, dtype="bfloat16", attention_backend="flash", sequence_length=64)
    configure(train, CPU)
    compile_ahead(["block.0"], model, train, CPU)
    block = build_layer("block.0", model, attention_backend="flash").to_empty(device="cpu").to(torch.bfloat16)
    assert isinstance(block, Block)
    block.compute_again(recompute)
    compile_layer(block)
    hidden = torch.randn(train.microbatch_size, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = {hidden.data_ptr(): hidden.nbytes}
    own = {parameter.data_ptr() for parameter in block.parameters()}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        is_table = tensor.shape == (64, 1, model.head_width_of(0))  # rotary positions, one for all blocks
        if tensor.data_ptr() not in own and not is_table:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        output = block(hidden)
    assert output.requires_grad  # its graph, with what was noted, lives until here
    estimate = layer_costs(replace(make_job(train, EF), model=model), recompute)[1].activation_bytes
    assert sum(kept.values()) == pytest.approx(estimate, rel=0.02)


def test_the_compiler_chooses_nothing_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers whose cards were measured at different moments would have different code."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "deterministic", False)
    monkeypatch.setattr(compilation, "_compiled_for", None)
    monkeypatch.setattr(compilation, "_check_compiler", lambda _device: None)
    monkeypatch.setattr(compilation, "_run_once", lambda *_: None)
    compile_ahead(["embed"], MODEL, TRAIN, CPU)
    assert inductor.deterministic


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C++ compiler on the path, no triton beside a CUDA device → one line that names it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilationError, match=r"^train.compile: a CPU needs a C\+\+ compiler, .* no no-such-compiler"):
        compile_ahead(["embed"], MODEL, TRAIN, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(CompilationError, match="needs the package triton"):
        compile_ahead(["embed"], MODEL, TRAIN, torch.device("cuda", 0))


def test_each_kind_is_compiled_once_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named kinds first, then the others, nothing twice; another job → everything again."""
    ran: list[str] = []
    monkeypatch.setattr(compilation, "_compiled_for", None)
    monkeypatch.setattr(compilation, "_check_compiler", lambda _device: None)
    monkeypatch.setattr(compilation, "_run_once", lambda name, *_: ran.append(name.partition(".")[0]))
    compile_ahead(["head", "block.2"], MODEL, TRAIN, CPU)
    compile_ahead(["embed", "block.0"], MODEL, TRAIN, CPU)
    assert ran == ["block", "head", "embed"]
    compile_ahead(["block.1"], MODEL, replace(TRAIN, sequence_length=16), CPU)
    assert ran[3:] == ["block", "embed", "head"]


def test_blocks_that_mix_their_tokens_otherwise_have_codes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window from the second block on, and no positions in the third → each block is compiled ahead."""
    ran: list[str] = []
    monkeypatch.setattr(compilation, "_compiled_for", None)
    monkeypatch.setattr(compilation, "_check_compiler", lambda _device: None)
    monkeypatch.setattr(compilation, "_run_once", lambda name, *_: ran.append(name))
    model = replace(MODEL, sliding_window=3, first_window_layer=1, no_rope_layer_interval=3)
    compile_ahead(["block.0"], model, TRAIN, CPU)
    assert sorted(ran) == ["block.0", "block.1", "block.2", "embed", "head"]


def test_only_what_is_computed_here_has_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that does not compile → no word as long as it is elsewhere; then one line, each time it is asked for."""

    def runs(name: str, *_: object) -> None:
        if name == "head":
            raise RuntimeError("\nno space left\nand a long story")

    monkeypatch.setattr(compilation, "_compiled_for", None)
    monkeypatch.setattr(compilation, "_check_compiler", lambda _device: None)
    monkeypatch.setattr(compilation, "_run_once", runs)
    compile_ahead(["block.0"], MODEL, TRAIN, CPU)
    for _ in range(2):
        with pytest.raises(CompilationError) as caught:
            compile_ahead(["head"], MODEL, TRAIN, CPU)
        assert str(caught.value) == "train.compile: head cannot be compiled here: no space left"
