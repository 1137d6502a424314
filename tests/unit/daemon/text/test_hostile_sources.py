"""Files that inflate, lines without an end, and pipes: one clear line or bounded memory, and never a wait."""

import bz2
import gzip
import json
import lzma
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare

MIB = 1 << 20
PREPARE = """
import json, re, sys
from pathlib import Path
from headway.daemon.base.errors import ConfigError
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
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


TEXT = "Grüße,\nWelt\n"


def zstd(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, compresslevel=1),
    "zst": zstd,
    "bz2": partial(bz2.compress, compresslevel=1),
    "xz": partial(lzma.compress, preset=0),
}
"""As quick as each can."""


def bytes_of(source: Path, *, binary: bool = False) -> bytes:
    """The only shard that a source becomes."""
    out = source.parent / f"out of {source.name}"
    prepare([str(source)], out, Preparation(binary=binary))
    return (out / "shard-00000.bin").read_bytes()


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_compressed_file_is_read_as_what_it_holds(tmp_path: Path, suffix: str, kind: str) -> None:
    """Also when it has two parts, as `cat` makes them, and is filled up with zero bytes."""
    content = (TEXT if kind == "txt" else json.dumps({"text": TEXT}) + "\n").encode()
    source = tmp_path / f"in.{kind}.{suffix}"
    source.write_bytes(COMPRESSORS[suffix](content) * 2 + bytes(4096))
    document = TEXT.encode()
    assert bytes_of(source) == (document * 2 + b"\0" if kind == "txt" else (document + b"\0") * 2)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, suffix: str) -> None:
    """The last bytes are missing, or others stand at its end: no part of it is trained on."""
    whole = COMPRESSORS[suffix](TEXT.encode())
    for content in (whole[:-3], whole + b"more", b"no compressed data"):
        (tmp_path / f"in.txt.{suffix}").write_bytes(content)
        with pytest.raises(ConfigError, match=r"(is cut off|cannot be decompressed): .*; fetch it again"):
            prepare([str(tmp_path / f"in.txt.{suffix}")], tmp_path / "out")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_file_that_inflates_takes_bounded_memory(tmp_path: Path, suffix: str) -> None:
    """A line of 256 MiB in a few kilobytes is left out, and the line after it is used."""
    source = tmp_path / f"in.jsonl.{suffix}"
    source.write_bytes(COMPRESSORS[suffix](b" " * 256 * MIB + b'x\n{"text": "good"}\n'))
    said, peak = prepared(source, max_bad=1)
    assert said == 1
    assert peak < 600
    assert (tmp_path / "out" / "shard-00000.bin").read_bytes() == b"good\0"


def test_an_xz_file_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    """Its dictionary would take 1 GiB."""
    filters = [
        {"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3, "nice_len": 3}
    ]
    (tmp_path / "in.txt.xz").write_bytes(lzma.compress(TEXT.encode(), filters=filters))
    with pytest.raises(ConfigError, match="Memory usage limit"):
        prepare([str(tmp_path / "in.txt.xz")], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("in.txt", gzip.compress(b"text", mtime=0), r"compressed by gzip: end its name with \.gz"),
        ("in.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), r"compressed by gzip: end its name with \.gz"),
        ("in.txt", TEXT.encode("utf-16"), "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"),
        ("in.txt", TEXT.encode("latin-1"), "has the byte 0xfc at 2: convert it, for example with `iconv"),
        ("in.txt", b"a" * 70_000 + b"\0", "has a zero byte at 70000"),
        ("in.txt", b"SQLite format 3\0", "is SQLite: write a table with `sqlite3 -header -csv FILE"),
        ("in.txt", b"%PDF-1.4 of letters alone", "is a PDF"),
        ("in.txt.gz", gzip.compress(b"PNG\0", mtime=0), "has a zero byte at 3"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    """One line names the file, what it is and, of a text, the option that takes it as it is; nothing is left behind."""
    (tmp_path / name).write_bytes(content)
    hint = (
        r"; --binary takes every file as it is, and a pattern such as 'FOLDER/\*\*/\*\.md' some of a folder"
        if ".txt" in name
        else ""
    )
    with pytest.raises(ConfigError, match=rf"{name}: is no UTF-8 text, .*{reason}.*{hint}$"):
        prepare([str(tmp_path / name)], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_binary_takes_a_file_as_it_is(tmp_path: Path) -> None:
    """Compressed lines, a byte-order mark, zero bytes: a document of these bytes."""
    for name, content in [
        ("in.jsonl.gz", gzip.compress(b"text", mtime=0)),
        ("in.txt", b"\xef\xbb\xbfa"),
        ("a.bin", b"\0\xff"),
    ]:
        (tmp_path / name).write_bytes(content)
        assert bytes_of(tmp_path / name, binary=True) == content + b"\0"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_is_not_trained(tmp_path: Path, suffix: str) -> None:
    """The one at the begin of the file; another is text."""
    content = b"\xef\xbb\xbf" + "a\ufeffb".encode()
    (tmp_path / f"in.txt{suffix}").write_bytes(gzip.compress(content, mtime=0) if suffix else content)
    assert bytes_of(tmp_path / f"in.txt{suffix}") == "a\ufeffb".encode() + b"\0"
