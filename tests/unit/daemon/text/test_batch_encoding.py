"""Documents are encoded in batches: whatever is in one batch, the shards are those of one document at a time."""

import json
from pathlib import Path

import pytest

from headway.daemon.text import batch_encoding
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.rigs.tiny_chats import write_chat_tokenizer, write_chats


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_texts(path: Path) -> None:
    """Empty ones, one that names a special token, long ones, and records that have none."""
    texts = ["", "one", "<|end|> is a word here", "äöü " * 300, "two\nlines", "", "x" * 70]
    records = [json.dumps({"text": text}) for text in texts * 20]
    records[13] = json.dumps({"texts": "another column"})
    records[14] = "no JSON"
    path.write_text("\n".join(records), encoding="utf-8")


@pytest.mark.parametrize("options", [{}, {"pack": 40}, {"flags": True, "validation": 0.3}, {"max_tokens": 900}])
@pytest.mark.parametrize("source", ["texts.jsonl", "chats.jsonl"])
def test_the_size_of_a_batch_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: dict[str, float]
) -> None:
    """One document at a time, batches of a few, and all in one: equal shards, counts and warnings."""
    (tmp_path / "model").mkdir()
    write_chat_tokenizer(tmp_path / "model")
    write_texts(tmp_path / "texts.jsonl")
    write_chats(tmp_path / "chats.jsonl")
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "nobody", "content": 3}]}) + "\n")
    found = []
    for number, (num_bytes, num_items) in enumerate(((1, 1), (500, 7), (1 << 20, 4096))):
        monkeypatch.setattr(batch_encoding, "BATCH_BYTES", num_bytes)
        monkeypatch.setattr(batch_encoding, "BATCH_ITEMS", num_items)
        warned: list[str] = []
        preparation = Preparation(
            tokenizer=str(tmp_path / "model"),
            chat=source.startswith("chats"),
            max_bad=50,
            **options,  # type: ignore[arg-type]
        )
        out = tmp_path / f"out-{number}"
        prepared = prepare([str(tmp_path / source)], out, preparation, warn=warned.append)
        found.append((content(out), prepared.train, prepared.validation, prepared.num_bad, warned))
    assert found[0] == found[1] == found[2]
    assert found[0][1].tokens
