"""Text in every accepted form becomes the same shards, and what is wrong with it is told in one line."""

import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.encoder import read_encoder
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.tokens import TokenShards

TEXTS = ["Grüße,\nWelt\n", "second document", ""]
EXPECTED = b"".join(text.encode() + b"\0" for text in TEXTS)


def stream(folder: Path) -> bytes:
    shards = TokenShards.open(folder)
    return b"".join((folder / shard.file).read_bytes() for shard in shards.index.shards)


def write_jsonl(path: Path, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def test_text_files_of_a_folder_are_documents_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Three files written out of order: their bytes by name, a zero byte after each."""
    for name, text in [("c.txt", TEXTS[2]), ("a.txt", TEXTS[0]), ("b.md", TEXTS[1])]:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(text, encoding="utf-8")
    index = prepare([str(tmp_path / "in")], tmp_path / "out").index
    assert stream(tmp_path / "out") == EXPECTED
    assert (index.vocab_size, index.tokenizer, index.dtype) == (256, "bytes", "uint8")
    assert str(tmp_path / "in") in index.provenance


def test_a_hugging_face_data_set_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked for the named configuration and split, streaming; records become documents."""
    asked: list[Any] = []
    datasets = ModuleType("datasets")

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((args, options))
        return iter([{"text": text} for text in TEXTS])

    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    prepare(["hf:HuggingFaceFW/fineweb-edu"], tmp_path / "out", Preparation(config="sample-10BT", split="train"))
    assert asked == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True})]
    assert stream(tmp_path / "out") == EXPECTED


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    """Two row groups: the column's texts in order, and only that column."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": TEXTS, "id": [1, 2, 3]}), tmp_path / "in.parquet", row_group_size=2)
    prepare([str(tmp_path / "in.parquet")], tmp_path / "out", Preparation(field="body"))
    assert stream(tmp_path / "out") == EXPECTED
    with pytest.raises(ConfigError, match="has no column 'text'"):
        prepare([str(tmp_path / "in.parquet")], tmp_path / "other")
    (tmp_path / "in.parquet").write_bytes(b"PAR1, but not for long")
    with pytest.raises(ConfigError, match=r"in\.parquet: cannot be read"):
        prepare([str(tmp_path / "in.parquet")], tmp_path / "other")


@pytest.mark.parametrize(("module", "source"), [("pyarrow.parquet", "in.parquet"), ("datasets", "hf:some/data")])
def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str
) -> None:
    """Without the optional libraries: one line that says what to install, and no folder."""
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[data\]'"):
        prepare([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizers_file_encodes_and_travels_along(tmp_path: Path) -> None:
    """A word-level tokenizer with an end-of-text token: ids, one end a document, the file beside the shards."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("one two\nthree one")
    index = prepare(
        [str(tmp_path / "in.txt")] * 2, tmp_path / "out", Preparation(tokenizer=str(tmp_path / "words.json"))
    ).index
    assert list(stream(tmp_path / "out")) == [1, 2, 3, 1, 0] * 2
    assert (index.vocab_size, index.tokenizer) == (4, "tokenizer.json")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()


@pytest.mark.parametrize("max_tokens", [1, 10, 14, 20])
def test_max_tokens_ends_early_and_exactly(tmp_path: Path, max_tokens: int) -> None:
    """Inside a document, at its end, in the next: so many tokens, the first ones."""
    source = str(write_jsonl(tmp_path / "in.jsonl"))
    prepare([source], tmp_path / "out", Preparation(max_tokens=max_tokens))
    assert stream(tmp_path / "out") == EXPECTED[:max_tokens]


def test_a_console_shows_progress(tmp_path: Path) -> None:
    """The bar counts bytes and tokens and ends at 100 %."""
    console = Console(file=StringIO(), force_terminal=True, width=100)
    prepare([str(write_jsonl(tmp_path / "in.jsonl"))], tmp_path / "out", console=console)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "100%" in shown
    assert "bytes" in shown
    assert f"{len(EXPECTED)} tokens" in shown


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("in.jsonl", b'{"text": "good"}\n{"body": "bad"}\n', r"in\.jsonl, line 2: has no text in the field 'text'"),
        ("in.jsonl", b'{"text": 5}\n', "line 1: has no text in the field"),
        ("in.jsonl", b"[]\n", "no text in it$"),
        ("in.json", b'[{"text": "a"}, {}]', r"in\.json, record 2, line 1: has no text"),
        ("in.jsonl", b'{"messages": []}\n', "line 1: has no text in the field 'text'; conversations need --chat"),
        ("in.jsonl", b"{\n", "line 1: is not JSON"),
        ("in.jsonl", b"\n", "no text in it"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    """The file and the line; nothing is left behind."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        prepare([str(tmp_path / name)], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_tokenizer_takes_no_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Not even with `--binary`, which the byte tokens are for."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_bytes(b"\xff\xfe")
    options = Preparation(tokenizer=str(tmp_path / "words.json"), binary=True)
    with pytest.raises(ConfigError, match=r"in\.txt: is not UTF-8"):
        prepare([str(tmp_path / "in.txt")], tmp_path / "out", options)


@pytest.mark.parametrize(
    ("sources", "tokenizer", "reason"),
    [
        ([], "bytes", "no source of text"),
        (["nowhere.txt"], "bytes", "nowhere.txt: no such file"),
        (["empty"], "bytes", "empty: this folder holds no files"),
        (["in.txt"], "nothing.json", "nothing.json: no such tokenizer"),
        (["in.txt"], "n" * 10_000, f"{'n' * 500}: no such tokenizer"),
        (["in.txt"], "in.txt", "in.txt: is not a tokenizers JSON file"),
        (["in.txt"], "bytes", "taken: exists already"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], tokenizer: str, reason: str
) -> None:
    """Each gives one line that says what and where."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError) as caught:
        prepare(sources, Path("taken"), Preparation(tokenizer=tokenizer))
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


def test_data_without_a_usable_record_says_how_many_are_left_out(tmp_path: Path) -> None:
    """The file is not empty, so "no text in it" alone would mislead."""
    (tmp_path / "in.jsonl").write_bytes(b"{}\n{}\n")
    with pytest.raises(ConfigError, match="no text in it but 2 records that cannot be used"):
        prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", Preparation(max_bad=5))


def test_the_cache_of_the_hub_is_no_tokenizer_but_says_where_one_is(tmp_path: Path) -> None:
    """People name models--OWNER--NAME, where snapshots/REVISION has the files."""
    (tmp_path / "snapshots").mkdir()
    with pytest.raises(ConfigError, match=r"no such tokenizer: .*/snapshots/REVISION"):
        read_encoder(Preparation(tokenizer=str(tmp_path)))
