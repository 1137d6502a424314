"""Initial weights are a function of (seed, layer, parameter) and nothing else."""

import torch

from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, layer_names

SPEC = ModelSpec(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
)


def test_a_layer_starts_equal_whoever_asks_and_when() -> None:
    """Ask for the layers in two orders, with torch's own generator moved between: equal bits."""
    first = {name: initial_parameters(name, SPEC, seed=3) for name in layer_names(SPEC)}
    torch.randn(7)
    second = {name: initial_parameters(name, SPEC, seed=3) for name in reversed(layer_names(SPEC))}
    for layer, parameters in first.items():
        for name, tensor in parameters.items():
            assert torch.equal(tensor, second[layer][name])


def test_depth_does_not_change_a_block() -> None:
    """block.0 of a deeper model is block.0 of this one."""
    deeper = ModelSpec(**{**{f: getattr(SPEC, f) for f in SPEC.__slots__}, "num_hidden_layers": 9})
    mine, theirs = (initial_parameters("block.0", spec, seed=3) for spec in (SPEC, deeper))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_seed_layer_and_parameter_each_change_the_weights() -> None:
    """Two seeds, two blocks, two parameters of one shape: all different."""
    block = initial_parameters("block.0", SPEC, seed=3)
    other_seed = initial_parameters("block.0", SPEC, seed=4)
    other_block = initial_parameters("block.1", SPEC, seed=3)
    name = "mlp.gate_proj.weight"
    assert not torch.equal(block[name], other_seed[name])
    assert not torch.equal(block[name], other_block[name])
    assert not torch.equal(block[name], block["mlp.up_proj.weight"])


def test_weights_are_fp32_normal_and_norms_are_ones() -> None:
    """Shapes are the module's; deviation is initializer_range to 5 %; mean is near 0."""
    for layer in layer_names(SPEC):
        parameters = initial_parameters(layer, SPEC, seed=0)
        assert {name: tensor.shape for name, tensor in parameters.items()} == parameter_shapes(layer, SPEC)
        for name, tensor in parameters.items():
            assert tensor.dtype == torch.float32
            if "norm" in name:
                assert torch.equal(tensor, torch.ones_like(tensor))
            else:
                assert abs(tensor.std().item() / SPEC.initializer_range - 1) < 0.05
                assert abs(tensor.mean().item()) < 0.002


def test_the_first_weights_are_these() -> None:
    """Golden values: whoever changes them changes every run that was ever made."""
    weight = initial_parameters("block.0", SPEC, seed=7)["self_attn.q_proj.weight"]
    assert weight.flatten()[:3].tolist() == [-0.012691900134086609, -0.006788569502532482, -0.006144649814814329]
