"""Each parameter goes to its optimizer."""

import torch

from headway.optim.routing import Group, route_layer


def test_block_matrices_go_to_one_optimizer_and_the_rest_to_the_other() -> None:
    """A block with matrices, a norm and a bias → matrices apart, each group in name order."""
    block = {
        "b.weight": torch.ones(2, 3),
        "norm.weight": torch.ones(2),
        "a.weight": torch.ones(3, 2),
        "a.bias": torch.ones(3),
    }
    expected = {Group.MATRICES: ("a.weight", "b.weight"), Group.REST: ("a.bias", "norm.weight")}
    assert route_layer("block.3", block) == expected
    assert route_layer("block.3", dict(reversed(block.items()))) == expected


def test_embedding_and_head_are_no_block_matrices() -> None:
    """2-D weights outside the blocks → rest; a group without parameters does not appear."""
    for layer in ("embed", "head"):
        assert route_layer(layer, {"weight": torch.ones(4, 2)}) == {Group.REST: ("weight",)}
