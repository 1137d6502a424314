"""Hugging Face's transformers opens what Headway writes, and computes the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from headway.daemon.models.model_folder import read_model, sample, write_model
from headway.daemon.text.data_tokenizer import DataTokenizer, tokenizer_json
from headway.stages.model.decoder import build_layer
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, layer_names

SPEC = ModelSpec(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=8,
    num_key_value_heads=2,
    rope_theta=5000.0,
    rms_norm_eps=1e-6,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    weights = {name: initial_parameters(name, SPEC, seed=11) for name in layer_names(SPEC)}
    weights["head"]["norm.weight"].mul_(1.5)
    write_model(path, SPEC, weights=weights, sequence_length=48, tokenizer=DataTokenizer(text=tokenizer_json()))
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_logits_are_the_same(folder: Path, theirs: Any) -> None:
    """A written model, opened by AutoModelForCausalLM, gives our logits to fp32 rounding; grouped heads, own theta."""
    tokens = torch.randint(0, SPEC.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    hidden = tokens
    weights = read_model(folder).weights
    with torch.no_grad():
        for name in layer_names(SPEC):
            hidden = functional_call(build_layer(name, SPEC), weights[name], (hidden,))
        expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_same(folder: Path, theirs: Any) -> None:
    """The gradient of the embedding, which passes through everything, agrees too."""
    tokens = torch.randint(0, SPEC.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))
    weights = read_model(folder).weights
    embedding = weights["embed"]["weight"].requires_grad_()
    hidden = tokens
    for name in layer_names(SPEC):
        hidden = functional_call(build_layer(name, SPEC), weights[name], (hidden,))
    (found,) = torch.autograd.grad(hidden.square().mean(), embedding)
    (expected,) = torch.autograd.grad(theirs(tokens).logits.square().mean(), theirs.get_input_embeddings().weight)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item())


def test_the_tokenizer_is_the_bytes(folder: Path) -> None:
    """AutoTokenizer maps a text with every kind of character to its UTF-8 bytes, and back."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n\treturn 'ä€😀' \x00\x7f  # two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_greedy_sampling_is_the_same(folder: Path, theirs: Any) -> None:
    """transformers' generate and our sample continue a prompt alike."""
    prompt = "import os\n"
    tokens = torch.tensor([list(prompt.encode())])
    expected = theirs.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, tokens.shape[1] :]
    assert sample(folder, prompt, num_tokens=20, temperature=0) == bytes(expected.tolist()).decode(errors="replace")
