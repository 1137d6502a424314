"""Arrow files, as `datasets.save_to_disk` leaves them, and records that no UTF-8 can hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.tokens import TokenShards

TEXTS = ["Grüße", "second", ""]
EXPECTED = b"".join(text.encode() + b"\0" for text in TEXTS)


def stream(folder: Path) -> bytes:
    shards = TokenShards.open(folder)
    return b"".join((folder / shard.file).read_bytes() for shard in shards.index.shards)


def saved(folder: Path, texts: list[str], *, is_stream: bool = True) -> Path:
    """A folder as datasets saves one: Arrow files and two descriptions."""
    arrow = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        table = arrow.table({"text": [text], "id": [number]})
        name = f"data-{number:05d}-of-{len(texts):05d}.arrow"
        make: Any = ipc.new_stream if is_stream else ipc.new_file
        with make(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_saved_data_set_is_read_and_its_descriptions_are_not(tmp_path: Path, is_stream: bool) -> None:
    """The column's texts in the order of the files; not one byte of the files themselves."""
    prepare([str(saved(tmp_path / "in", TEXTS, is_stream=is_stream))], tmp_path / "out")
    assert stream(tmp_path / "out") == EXPECTED


def test_of_saved_splits_one_is_read(tmp_path: Path) -> None:
    """A DatasetDict: the split that is asked for; one that is not there is named with those that are."""
    saved(tmp_path / "in" / "train", TEXTS)
    saved(tmp_path / "in" / "test", ["other"])
    (tmp_path / "in" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    prepare([str(tmp_path / "in")], tmp_path / "out")
    assert stream(tmp_path / "out") == EXPECTED
    prepare([str(tmp_path / "in")], tmp_path / "held-out", Preparation(split="test"))
    assert stream(tmp_path / "held-out") == b"other\0"
    with pytest.raises(ConfigError, match="has no split 'dev'; there are train, test"):
        prepare([str(tmp_path / "in")], tmp_path / "dev", Preparation(split="dev"))


def test_a_damaged_arrow_file_is_one_line(tmp_path: Path) -> None:
    """Other bytes under that name, and a column that is not there."""
    folder = saved(tmp_path / "in", TEXTS)
    with pytest.raises(ConfigError, match="has no column 'body'; there are text, id"):
        prepare([str(folder)], tmp_path / "out", Preparation(field="body"))
    (folder / "data-00001-of-00003.arrow").write_bytes(b"no arrow at all")
    with pytest.raises(ConfigError, match=r"data-00001-of-00003\.arrow: cannot be read"):
        prepare([str(folder)], tmp_path / "out")


def test_without_pyarrow_an_arrow_file_is_refused_not_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the extra."""
    (tmp_path / "in.arrow").write_bytes(b"ARROW1 and so on")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[data\]'"):
        prepare([str(tmp_path / "in.arrow")], tmp_path / "out")


def test_half_a_character_is_one_line(tmp_path: Path) -> None:
    """A lone surrogate, which JSON can say and UTF-8 cannot: file, line, field, and what to do."""
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"text": "a\\ud800b"}\n')
    with pytest.raises(ConfigError) as refused:
        prepare([str(tmp_path / "in.jsonl")], tmp_path / "out")
    assert "in.jsonl, line 2: has half a character, '\\ud800', in the field 'text'" in str(refused.value)
