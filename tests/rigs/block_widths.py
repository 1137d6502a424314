"""Parts that tests of block widths share."""

import torch
from torch import Tensor

from headway.stages.model.decoder import build_layer
from headway.stages.spec import ModelSpec

TOKENS = 64


MOST_BESIDE = 56
"""Values per token that the widths leave out: sines, one number of each norm, attention's log-sums, where rows go."""


def saved_values(model: ModelSpec, name: str = "block.0") -> int:
    """Number of float32 values that the forward of a block saves for its backward, each storage once."""
    block = build_layer(name, model, attention_backend="flash").to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(1, TOKENS, model.hidden_size, requires_grad=True))
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 4 for tensor in held}
    return sum(size for address, size in sizes.items() if address not in own)
