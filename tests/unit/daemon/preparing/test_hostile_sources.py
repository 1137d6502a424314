"""Files that inflate, lines without an end, and pipes: one clear line or bounded memory, and never a wait."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.preparing.preparation import Preparation
from headway.daemon.preparing.prepare import prepare

MIB = 1 << 20
PREPARE = """
import json, re, sys
from pathlib import Path
from headway.daemon.errors import ConfigError
from headway.daemon.preparing.preparation import Preparation
from headway.daemon.preparing.prepare import prepare
try:
    said = prepare(sys.argv[1:2], Path(sys.argv[2]), Preparation(**json.loads(sys.argv[3]))).num_bad
except ConfigError as error:
    said = str(error)
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())  # of this program alone
print(json.dumps([said, int(peak[1]) >> 10]))
"""


def prepared(source: Path, **options: Any) -> tuple[Any, int]:
    """The number of bad records or the error, and the process's peak memory in MiB."""
    told = subprocess.run(
        [sys.executable, "-c", PREPARE, str(source), str(source.parent / "out"), json.dumps(options)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    ).stdout
    said, peak = json.loads(told)
    return said, peak


def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    """1 GiB without a line end, on a disk that holds them as a hole: left out, and the line after it is used."""
    source = tmp_path / "in.jsonl"
    with source.open("wb") as file:
        file.seek(1 << 30)
        file.write(b'\n{"text": "good"}\n')
    said, peak = prepared(source, max_bad=1)
    assert said == 1
    assert peak < 600
    assert (tmp_path / "out" / "shard-00000.bin").read_bytes() == b"good\0"


def test_a_text_without_lines_takes_bounded_memory(tmp_path: Path) -> None:
    """64 MiB of text with neither a space nor a line end."""
    (tmp_path / "in.txt").write_bytes(b"a" * 64 * MIB)
    said, peak = prepared(tmp_path / "in.txt")
    assert said == 0
    assert peak < 250


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """It is not opened, so nothing waits for a writer."""
    place = tmp_path / "in.jsonl"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
    with pytest.raises(ConfigError, match=r"in\.jsonl: is a pipe, a socket or a device; write its text to a file"):
        prepare([str(place)], tmp_path / "out")


def test_a_pipe_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    """As every other thing that is no file."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "in" / "b.txt")
    prepare([str(tmp_path / "in")], tmp_path / "out")
    assert (tmp_path / "out" / "shard-00000.bin").read_bytes() == b"text\0"


def repeated(text: str, times: int) -> Any:
    """An array of Arrow that names one text many times."""
    arrow = pytest.importorskip("pyarrow")
    return arrow.DictionaryArray.from_arrays(arrow.array([0] * times, arrow.int32()), arrow.array([text]))


def write_parquet(path: Path, **columns: Any) -> Path:
    """A parquet file whose dictionary may have any size."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        arrow.table(columns), path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30
    )
    return path


def in_lists(contents: Any, offsets: list[int]) -> Any:
    """Conversations of so many messages."""
    arrow = pytest.importorskip("pyarrow")
    roles = arrow.array(["user"] * len(contents))
    return arrow.ListArray.from_arrays(
        arrow.array(offsets), arrow.StructArray.from_arrays([roles, contents], ["role", "content"])
    )


def test_a_text_that_a_parquet_file_repeats_is_read_one_row_at_a_time(tmp_path: Path) -> None:
    """A few KB of file with 60 rows of 32 MiB: a row at a time is in memory, up to the wanted tokens."""
    source = write_parquet(tmp_path / "in.parquet", text=repeated("a" * 32 * MIB, 60))
    assert source.stat().st_size < MIB
    said, peak = prepared(source, max_tokens=150 * MIB)
    assert said == 0
    assert peak < 800


def test_a_conversation_that_repeats_a_text_is_left_out(tmp_path: Path) -> None:
    """A list of 20,000 times 1 MiB, of which the file holds one: named, and never made."""
    source = write_parquet(tmp_path / "in.parquet", messages=in_lists(repeated("a" * MIB, 20_000), [0, 10_000, 20_000]))
    said, peak = prepared(source, field="messages")
    assert "row 1: is longer than 128 MiB" in str(said)
    assert peak < 600


def test_rows_that_are_too_large_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """One row of 200 MiB in a few KB: the file says how much it inflates to."""
    source = write_parquet(tmp_path / "in.parquet", text=["a" * 200 * MIB])
    said, peak = prepared(source, max_bad=5)
    assert "the 1 rows of its row group 0 inflate to 200 MiB; a record has at most 128 MiB" in str(said)
    assert peak < 300


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_arrow_file_that_inflates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """A compressed batch beyond the limit is named with its size; one within it, and one not compressed, are read."""
    monkeypatch.setattr("headway.daemon.sources.arrow_sources.MAX_INFLATED_BYTES", MIB)
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    make: Any = ipc.new_stream if is_stream else ipc.new_file

    def written(length: int, compression: str | None) -> str:
        table = arrow.table({"text": ["a" * length]})
        place = tmp_path / f"{length}-{compression}.arrow"
        with make(str(place), table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)
        return str(place)

    prepare([written(MIB // 2, "zstd"), written(4 * MIB, None)], tmp_path / "out")
    assert (tmp_path / "out" / "shard-00000.bin").stat().st_size == MIB // 2 + 1 + 4 * MIB + 1
    with pytest.raises(ConfigError, match="its message 1 inflates to 4 MiB; at most 1 MiB"):
        prepare([written(4 * MIB, "zstd")], tmp_path / "other")
    with pytest.raises(ConfigError, match="its message 1 inflates to 3 MiB"):
        prepare([written(3 * MIB, "lz4")], tmp_path / "other")


def test_an_arrow_dictionary_that_repeats_a_text_is_measured(tmp_path: Path) -> None:
    """Lists over a dictionary: the long conversation is left out, the short one is used."""
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = arrow.table({"messages": in_lists(repeated("a" * MIB, 1001), [0, 1, 1001])})
    with ipc.new_stream(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigError, match=r"row 1: has no text"):
        prepare([str(tmp_path / "in.arrow")], tmp_path / "out", Preparation(field="messages"))
    said, peak = prepared(tmp_path / "in.arrow", field="messages", max_bad=1)
    assert "row 2: is longer than 128 MiB" in str(said)
    assert peak < 500


def test_a_type_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    """Views may name one text any number of times."""
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = arrow.table({"text": arrow.array(["a"], arrow.string_view())})
    with ipc.new_stream(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigError, match="its column 'text' has the type string_view, which is not read"):
        prepare([str(tmp_path / "in.arrow")], tmp_path / "out")
