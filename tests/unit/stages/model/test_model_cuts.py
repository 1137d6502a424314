"""A model cut between any two layers computes what the whole model computes, to the last bit."""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.model.determinism import configure
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

SPEC = ModelSpec(
    num_hidden_layers=3,
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=61,
)
NAMES = layer_names(SPEC)
LAYERS = {name: build_layer(name, SPEC) for name in NAMES}
DTYPES = [torch.float32, torch.bfloat16]

Gradients = dict[str, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    configure(TrainSpec(), torch.device("cpu"))


def make_weights(dtype: torch.dtype) -> Gradients:
    return {
        name: {key: value.to(dtype).requires_grad_() for key, value in initial_parameters(name, SPEC, seed=1).items()}
        for name in NAMES
    }


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SPEC.vocab_size, (3, 18), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_layers(names: tuple[str, ...], weights: Gradients, hidden: Tensor) -> Tensor:
    for name in names:
        hidden = functional_call(LAYERS[name], weights[name], (hidden,))
    return hidden


def by_name(names: tuple[str, ...], weights: Gradients, found: tuple[Tensor, ...]) -> Gradients:
    values = iter(found)
    return {name: {key: next(values) for key in weights[name]} for name in names}


def whole(weights: Gradients) -> tuple[Tensor, Gradients]:
    inputs, targets = make_batch()
    loss = token_loss(run_layers(NAMES, weights, inputs), targets)
    parameters = list(chain.from_iterable(weights[name].values() for name in NAMES))
    return loss, by_name(NAMES, weights, torch.autograd.grad(loss, parameters))


def cut_at(cuts: list[int], weights: Gradients) -> tuple[Tensor, Gradients]:
    """Each stage sees only its own input, as a leaf, and the gradient of its own output."""
    inputs, targets = make_batch()
    stages = [NAMES[start:end] for start, end in zip([0, *cuts], [*cuts, len(NAMES)], strict=True)]
    received: list[Tensor] = []
    sent: list[Tensor] = []
    hidden = inputs
    for stage in stages:
        hidden = hidden.detach().clone()
        if hidden.is_floating_point():
            hidden.requires_grad_()
        received.append(hidden)
        hidden = run_layers(stage, weights, hidden)
        sent.append(hidden)
    loss = token_loss(sent[-1], targets)
    sent[-1] = loss
    gradients: Gradients = {}
    upstream: Tensor | None = None
    for stage, entered, left in reversed(list(zip(stages, received, sent, strict=True))):
        parameters = list(chain.from_iterable(weights[name].values() for name in stage))
        wanted = [*parameters, entered] if entered.requires_grad else parameters
        found = torch.autograd.grad(left, wanted, upstream)
        gradients |= by_name(stage, weights, found[: len(parameters)])
        upstream = found[-1].clone() if entered.requires_grad else None
    return loss, gradients


def assert_same_bits(found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients]) -> None:
    assert torch.equal(found[0], expected[0])
    for layer, gradients in expected[1].items():
        for name, gradient in gradients.items():
            assert torch.equal(found[1][layer][name], gradient), f"{layer} {name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", range(1, len(NAMES)))
def test_one_cut_anywhere_changes_no_bit(cut: int, dtype: torch.dtype) -> None:
    """Two stages, activation and gradient handed over as copies: loss and every gradient are the whole model's."""
    weights = make_weights(dtype)
    assert_same_bits(cut_at([cut], weights), whole(weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stage_per_layer_changes_no_bit(dtype: torch.dtype) -> None:
    """As many stages as layers: loss and every gradient are the whole model's."""
    weights = make_weights(dtype)
    assert_same_bits(cut_at(list(range(1, len(NAMES))), weights), whole(weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_microbatch_gives_the_same_bits_again(dtype: torch.dtype) -> None:
    """Two runs of the whole model, deterministic algorithms on: equal bits, and no operation refuses."""
    weights = make_weights(dtype)
    assert_same_bits(whole(weights), whole(weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_lie_row_by_row(dtype: torch.dtype) -> None:
    """Sums over a gradient depend on its layout, so every stage must find the plain one."""
    _, gradients = whole(make_weights(dtype))
    assert all(gradient.is_contiguous() for layer in gradients.values() for gradient in layer.values())


def test_a_layer_is_only_a_formula() -> None:
    """Built layers hold no storage: weights come with the call."""
    assert all(parameter.is_meta for layer in LAYERS.values() for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["block.3", "block.", "block.x", "block.-1", "tail", ""])
def test_a_name_the_model_lacks_is_refused(name: str) -> None:
    """Three blocks are 0, 1 and 2."""
    with pytest.raises(ValueError, match="has no layer"):
        build_layer(name, SPEC)


@pytest.mark.parametrize("make_tensor", [torch.zeros, torch.ones])
def test_the_loss_is_fp32_and_a_mean_over_tokens(make_tensor: Callable[..., Tensor]) -> None:
    """Even logits: the loss is log(vocabulary), in fp32 for bf16 logits too."""
    loss = token_loss(make_tensor(2, 5, 61, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(torch.tensor(61.0).log().item(), rel=1e-6)
