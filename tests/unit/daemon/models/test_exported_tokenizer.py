"""The tokenizer of an exported model renders a chat as the one did with which its data was prepared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from transformers import AutoTokenizer

from headway.daemon.models.adapter_folder import AdapterFolderWriter
from headway.daemon.models.model_folder import ModelFolderWriter
from headway.daemon.models.origin_parts import Carried
from headway.daemon.text.data_tokenizer import DataTokenizer, tokenizer_of
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.shard_index import read_index
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import AdapterSpec, ModelSpec, layer_names
from tests.rigs.tiny_chats import CHATML, folder_of, write_chats

MODEL = ModelSpec(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=280)
CHAT = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(params=[True, False], ids=["chat_template.jinja", "named in tokenizer_config.json"])
def tokenizer(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a tokenizer and its chat template."""
    folder = folder_of(tmp_path, CHATML, in_file=request.param)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<s>"}))  # as transformers 5 reads it
    return folder


def of_data(tmp_path: Path, tokenizer: Path) -> DataTokenizer:
    """What conversations that were prepared with it say of it."""
    write_chats(tmp_path / "chats.jsonl", count=9)
    options = Preparation(tokenizer=str(tokenizer), chat=True)
    prepare([str(tmp_path / "chats.jsonl")], tmp_path / "data", options, warn=lambda _: None)
    found = tokenizer_of(tmp_path / "data", read_index(tmp_path / "data"))
    assert found is not None
    return found


def exported(out: Path, told: DataTokenizer, files: dict[str, bytes], *, is_adapter: bool = False) -> Any:
    """The tokenizer that transformers opens in an export. files: those that its origin has."""
    spec = replace(MODEL, adapter=AdapterSpec(rank=2)) if is_adapter else MODEL
    options: dict[str, Any] = {"tokenizer": told, "carried": Carried(files=files)}
    if is_adapter:
        with AdapterFolderWriter(out, spec, base="base", **options):
            pass
    else:
        with ModelFolderWriter(out, spec, sequence_length=64, **options) as writer:
            for layer in layer_names(spec):
                writer.add(layer, initial_parameters(layer, spec, seed=1))
    return AutoTokenizer.from_pretrained(out)


def rendered(tokenizer: Any) -> Any:
    return tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize("origin", ["none", "without a template", "whole"])
def test_an_export_has_the_chat_template(tmp_path: Path, tokenizer: Path, origin: str, is_adapter: bool) -> None:
    """The data's, if there is no origin, or one without a template; else the origin's files, byte for byte."""
    told = of_data(tmp_path, tokenizer)
    files = {path.name: path.read_bytes() for path in tokenizer.iterdir()} if origin != "none" else {}
    if origin == "without a template":
        files.pop("chat_template.jinja", None)
        files["tokenizer_config.json"] = b'{"eos_token": "<|end|>", "model_max_length": 77}'
    opened = exported(tmp_path / "out", told, files, is_adapter=is_adapter)
    assert (
        rendered(opened)
        == rendered(AutoTokenizer.from_pretrained(tokenizer))
        == ("<|start|>user\nWhat is 1 + 2?<|end|>\n<|start|>assistant\n")
    )
    assert (opened.eos_token, opened.model_max_length == 77) == ("<|end|>", origin == "without a template")
    if origin == "whole":
        assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files


def test_a_torn_config_of_an_origin_stays_as_it_is(tmp_path: Path) -> None:
    told = DataTokenizer(text="{}", chat_template=CHATML)
    assert told.files({"tokenizer.json": b"{}", "tokenizer_config.json": b"{"}) == {}
    assert told.files({"tokenizer.json": b"{}", "tokenizer_config.json": b"3"}) == {}
