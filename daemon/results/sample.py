"""Continues a text with a trained model folder, byte by byte."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.errors import ConfigError
from headway.daemon.results.model_folder import LoadedModel, read_model
from headway.stages.model.decoder import build_layer
from headway.stages.spec import layer_names

NUM_BYTES = 256


def sample(folder: Path, prompt: str, *, num_tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """Return the model's continuation of the prompt. temperature 0 takes the likeliest byte each time.

    Equal arguments give equal text on equal arithmetic. Raises ConfigError for a folder that is not a model of bytes.
    """
    model = read_model(folder)
    if model.spec.vocab_size != NUM_BYTES:
        raise ConfigError(f"has a vocabulary of {model.spec.vocab_size}; only byte tokens can be sampled", str(folder))
    tokens = continued(model, list(prompt.encode()), temperature=temperature, seed=seed)
    return bytes(next(tokens) for _ in range(num_tokens)).decode(errors="replace")


def continued(model: LoadedModel, tokens: list[int], *, temperature: float, seed: int) -> Iterator[int]:
    """Yield tokens after `tokens`, for ever; the model sees the last `sequence_length` of them. No start
    means byte 0.
    """
    layers = {name: build_layer(name, model.spec) for name in layer_names(model.spec)}
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or [0]
    while True:
        with torch.inference_mode():
            hidden = torch.tensor([tokens[-model.sequence_length :]])
            for name, layer in layers.items():
                # The head computes the last position alone.
                hidden = hidden[:, -1:] if name == "head" else hidden
                hidden = functional_call(layer, model.weights[name], (hidden,))
            token = _drawn(hidden[0, 0], temperature=temperature, generator=generator)
        tokens = [*tokens, token]
        yield token


def _drawn(logits: Tensor, *, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator))
