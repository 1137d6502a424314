"""Layer files and journals from outside: whatever their bytes are, a reader says DamagedFileError with the path."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.stages.errors import DamagedFileError
from headway.stages.ids import Boundary
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import read_journal
from headway.stages.state.state_file import FORMAT, ContentCheck, StateHeader, content_checksum, read_state, write_state

METADATA = {"format": FORMAT, "job": "j", "layer": "head", "boundary": "5", "timeline": "1", "dtype": "float32"}
HEADER = StateHeader(job="j", layer="journal", boundary=5, timeline=1, dtype="float32")


def canonical(header: object) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def file_of(head: bytes, data: bytes = b"") -> bytes:
    """A file with a header's length, header and data."""
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + data


def tensor(shape: object, offsets: object, dtype: object = "F32") -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return canonical({"__metadata__": METADATA, "w": entry})


CRAFTED = {
    "deep": file_of(b"[" * 100_000),
    "deep in a tensor": file_of(b'{"__metadata__":' + canonical(METADATA) + b',"w":' + b'{"a":' * 90_000 + b"1"),
    "infinite shape": file_of(tensor([1e308, 1e308], [0, 0])),
    "large shape": file_of(tensor([1e308], [0, 8]), bytes(8)),
    "whole floats": file_of(tensor([2.0], [0, 8]), bytes(8)),
    "true": file_of(tensor([True], [0, 4]), bytes(4)),
    "negative twice": file_of(tensor([-1, -1], [0, 4]), bytes(4)),
    "no elements of a large shape": file_of(tensor([0, 1 << 62, 1 << 62], [0, 0])),
    "many dimensions": file_of(tensor([1] * 5000, [0, 4]), bytes(4)),
    "shape is text": file_of(tensor("12", [0, 8]), bytes(8)),
    "no such type": file_of(tensor([1], [0, 4], "F31"), bytes(4)),
    "type is a list": file_of(tensor([1], [0, 4], ["F32"]), bytes(4)),
    "truncated": file_of(tensor([1], [0, 4]), bytes(3)),
    "not a dict": file_of(b"[1,2,3]"),
    "metadata is a list": file_of(canonical({"__metadata__": ["format"]})),
    "metadata has no text": file_of(canonical({"__metadata__": METADATA | {"job": {"a": 1}}})),
    "long number": file_of(b'{"__metadata__":' + b"9" * 5000 + b"}"),
    "a header larger than any": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header of the whole file": (1 << 20).to_bytes(8, "little") + b"{" * (1 << 20),
    "nothing": b"",
    "seven bytes": b"1234567",
}


def readers(path: Path) -> list[Any]:
    """Every way in which such a file is read."""

    def in_pieces() -> None:
        raw = path.read_bytes()
        check = ContentCheck(path, len(raw))
        for start in range(0, len(raw), 1 << 16):
            check.update(raw[start : start + (1 << 16)])
        check.checksum()

    return [
        lambda: read_state(path),
        lambda: content_checksum(path),
        lambda: read_journal(path, job="j", boundary=Boundary(5)),
        in_pieces,
    ]


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_damaged_and_no_more(tmp_path: Path, name: str) -> None:
    """Deep JSON, endless shapes, wrong types, cut short: one error that names the file, in one short line."""
    path = tmp_path / "head.safetensors"
    path.write_bytes(CRAFTED[name])
    for read in readers(path):
        with pytest.raises(DamagedFileError, match=r"head\.safetensors") as caught:
            read()
        assert len(str(caught.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "U8", "BF16"]) | JSON,
        "shape": st.lists(st.integers(-2, 1 << 64) | st.floats(), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-8, 64), min_size=2, max_size=2) | JSON,
    }
)
HEADS = st.one_of(
    st.binary(max_size=64),
    JSON.map(canonical),
    st.dictionaries(st.sampled_from(["a", "b"]), ENTRY | JSON, max_size=2).map(
        lambda index: canonical({"__metadata__": METADATA, **index})
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=HEADS, data=st.binary(max_size=64), cut=st.integers(0, 200))
def test_no_header_gets_any_further(tmp_path: Path, head: bytes, data: bytes, cut: int) -> None:
    """Any header, any data, cut anywhere: read as what it is, or damaged."""
    path = tmp_path / "head.safetensors"
    path.write_bytes(file_of(head, data)[: 400 - cut])
    for read in readers(path):
        with pytest.raises(DamagedFileError):
            read()


COLUMN = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    st.sampled_from([torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
)
COLUMNS = st.dictionaries(st.sampled_from(["batch", "generation", "losses", "seconds", "tokens", "more"]), COLUMN)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=COLUMNS)
def test_no_columns_but_a_journals_are_one(tmp_path: Path, columns: dict[str, torch.Tensor]) -> None:
    """A sound file whose tensors are anything: a journal that ends at its boundary, or damaged."""
    path = tmp_path / "journal.safetensors"
    write_state(path, columns, HEADER)
    try:
        journal = read_journal(path, job="j", boundary=Boundary(5))
    except DamagedFileError:
        return
    assert isinstance(journal, Journal)
    assert len(journal) in (0, 5)
