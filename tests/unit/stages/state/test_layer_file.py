"""A layer's file: the same bytes for the same content, and believed only when it is whole and the right one."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.stages.errors import DamagedFileError
from headway.stages.ids import Batch, Boundary, Generation, LayerName, Timeline
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_file import read_journal, read_layer, write_journal, write_layer
from headway.stages.state.layer_state import LayerState
from headway.stages.state.state_file import (
    ContentCheck,
    StateHeader,
    WriteCancelledError,
    WrittenFile,
    content_checksum,
    read_state,
    write_state,
)
from tests.rigs.pipeline import EF, Pipeline, factory_of, initial_layers, make_job, with_train

JOB = make_job(with_train(batches=3), EF)
BLOCK = LayerName("block.1")


@pytest.fixture(scope="module")
def trained() -> LayerState:
    """A block at boundary 3: two versions, momentum and Error Feedback's buffer."""
    layers = initial_layers(JOB)
    Pipeline(JOB, layers, Journal(), num_stages=1).run()
    return layers[BLOCK]


def write(path: Path, layer: LayerState) -> WrittenFile:
    return write_layer(path, layer, job="tiny", train=JOB.train, timeline=Timeline(2))


def read(path: Path, **changes: object) -> LayerState:
    asked = {"name": BLOCK, "job": "tiny", "boundary": Boundary(3), "timeline": Timeline(2)} | changes
    return read_layer(
        path,
        model=JOB.model,
        train=JOB.train,
        device="cpu",
        optimizer_factory=factory_of(JOB),
        **asked,  # type: ignore[arg-type]
    )


def test_a_layer_comes_back_whole(tmp_path: Path, trained: LayerState) -> None:
    """Written and read → the same tensors under the same names, with both versions and the optimizer's state."""
    write(tmp_path / "x", trained)
    again = read(tmp_path / "x").tensors()
    assert again.keys() == trained.tensors().keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in trained.tensors().items())
    assert {key.split("/")[0] for key in again} == {"current", "previous", "optim"}


def test_equal_content_gives_equal_bytes_that_safetensors_opens(tmp_path: Path, trained: LayerState) -> None:
    """Two nodes write the same layer → the same bytes and checksum, as its reader finds; the library reads the file."""
    first, second = write(tmp_path / "a", trained), write(tmp_path / "b", read_back(tmp_path / "c", trained))
    raw = (tmp_path / "a").read_bytes()
    assert raw == (tmp_path / "b").read_bytes()
    assert first.checksum == second.checksum == content_checksum(tmp_path / "a")
    assert first.size_bytes == len(raw)
    loaded = safetensors.torch.load_file(tmp_path / "a")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in trained.tensors().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def read_back(path: Path, layer: LayerState) -> LayerState:
    write(path, layer)
    return read(path)


def test_boundary_0_has_no_previous_version(tmp_path: Path) -> None:
    """A layer before its first update → written and read with its weights alone."""
    layer = initial_layers(JOB)[BLOCK]
    assert {key.split("/")[0] for key in layer.tensors()} == {"current"}
    write(tmp_path / "x", layer)
    assert torch.equal(
        read(tmp_path / "x", boundary=Boundary(0)).weights()["mlp.up_proj.weight"],
        layer.weights()["mlp.up_proj.weight"],
    )


def test_a_bfloat16_layer_is_its_master_and_the_older_cast() -> None:
    """bf16 at boundary 3 → an fp32 master, a bf16 W_2, and no other weights."""
    job = make_job(with_train(batches=3, dtype="bfloat16"), EF)
    layers = initial_layers(job)
    Pipeline(job, layers, Journal(), num_stages=1).run()
    dtypes = {key.split("/")[0]: tensor.dtype for key, tensor in layers[BLOCK].tensors().items()}
    assert dtypes == {"master": torch.float32, "previous": torch.bfloat16, "optim": torch.float32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": LayerName("block.0")}, "of layer block.1, and layer block.0 was asked for"),
        ({"boundary": Boundary(2)}, "of boundary 3"),
        ({"timeline": Timeline(1)}, "of timeline 2"),
        ({"job": "other"}, "of job tiny"),
    ],
)
def test_another_file_than_asked_for_is_refused(
    tmp_path: Path, trained: LayerState, changes: dict[str, object], words: str
) -> None:
    """Another layer, boundary, timeline or job → DamagedFileError that says which."""
    write(tmp_path / "x", trained)
    with pytest.raises(DamagedFileError, match=words):
        read(tmp_path / "x", **changes)


HEADER = StateHeader(job="j", layer="l", boundary=1, timeline=1, dtype="float32")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file small enough to damage in every place."""
    path = tmp_path_factory.mktemp("damage") / "small"
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(7), "c": torch.empty(0), "d": torch.ones(3).bfloat16()}
    write_state(path, tensors, HEADER)
    header, again = read_state(path)
    assert header == HEADER
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    return path


@given(data=st.data())
def test_any_flipped_bit_is_found(small_file: Path, data: st.DataObject) -> None:
    """One bit anywhere in the file, header and padding included → DamagedFileError."""
    raw = bytearray(small_file.read_bytes())
    place = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[place // 8] ^= 1 << (place % 8)
    damaged = small_file.with_name("flipped")
    damaged.write_bytes(raw)
    for reader in (read_state, content_checksum):
        with pytest.raises(DamagedFileError):
            reader(damaged)


def test_tensors_that_change_names_or_shapes_are_found(small_file: Path) -> None:
    """The data is as it was, and the index is a valid one, but of other tensors → DamagedFileError."""
    raw = small_file.read_bytes()
    damaged = small_file.with_name("renamed")
    for old, new in ((b'"c":', b'"cc":'), (b'"shape":[0]', b'"shape":[0,1]'), (b'"I64"', b'"F64"')):
        length = int.from_bytes(raw[:8], "little")
        head = raw[8 : 8 + length].rstrip().replace(old, new)
        assert head != raw[8 : 8 + length].rstrip()
        entries = json.loads(head)
        head = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        damaged.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
        for reader in (read_state, content_checksum):
            with pytest.raises(DamagedFileError, match="checksum"):
                reader(damaged)


def test_any_truncation_or_addition_is_found(small_file: Path) -> None:
    """Lengths from nothing to one byte less, and one byte more → DamagedFileError."""
    raw = small_file.read_bytes()
    damaged = small_file.with_name("cut")
    for content in (*(raw[:length] for length in {*range(0, len(raw), 23), 7, 8, 9, len(raw) - 1}), raw + b"\0"):
        damaged.write_bytes(content)
        for reader in (read_state, content_checksum):
            with pytest.raises(DamagedFileError):
                reader(damaged)


@given(data=st.data())
def test_pieces_of_any_size_give_the_same_checksum(small_file: Path, data: st.DataObject) -> None:
    """Cut anywhere, in the header too → the file's checksum; without the last byte → DamagedFileError."""
    raw = small_file.read_bytes()
    cuts = data.draw(st.sets(st.integers(1, len(raw) - 2) | st.integers(1, 12)))
    content = ContentCheck(small_file, len(raw))
    for begin, end in pairwise([0, *sorted(cuts), len(raw) - 1]):
        content.update(raw[begin:end])
    with pytest.raises(DamagedFileError, match="truncated"):
        content.checksum()
    content.update(raw[-1:])
    assert content.checksum() == content_checksum(small_file)


def test_a_header_longer_than_its_file_is_not_waited_for(small_file: Path) -> None:
    """The first eight bytes say so → DamagedFileError before anything else has come."""
    content = ContentCheck(small_file, 1 << 40)
    content.update(b"\xff\xff\xff")
    with pytest.raises(DamagedFileError, match="truncated"):
        content.update(b"\xff" * 5)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """The target is a folder → OSError, and no temporary file."""
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(OSError, match="x"):
        write_state(tmp_path / "x", {"a": torch.ones(1)}, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_write_that_is_not_wanted_leaves_nothing_behind(tmp_path: Path) -> None:
    """Cancelled before the first chunk, and between the last chunk and the name → no file at all."""
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    for answers in ([False], [True, True, False]):
        with pytest.raises(WriteCancelledError):
            write_state(tmp_path / "x", tensors, HEADER, is_wanted=iter(answers).__next__)
        assert not list(tmp_path.iterdir())


def test_a_layer_with_a_tensor_missing_is_refused(tmp_path: Path, trained: LayerState) -> None:
    """Momentum, the older version or a weight left out, or an unknown slot → DamagedFileError that names it."""
    header = StateHeader(job="tiny", layer=BLOCK, boundary=3, timeline=2, dtype="float32")
    tensors = trained.tensors()
    for key in ("previous/mlp.up_proj.weight", "current/mlp.up_proj.weight", next(k for k in tensors if "optim" in k)):
        write_state(tmp_path / "x", {k: t for k, t in tensors.items() if k != key}, header)
        with pytest.raises(DamagedFileError):
            read(tmp_path / "x")
    write_state(tmp_path / "x", tensors | {"surplus/a": torch.ones(1)}, header)
    with pytest.raises(DamagedFileError, match="has no surplus"):
        read(tmp_path / "x")


ROW = JournalRow(batch=Batch(4), microbatch_losses=(1.5, 0.1), tokens=8, seconds=0.25, generation=Generation(2))


def rows_of(*batches: int) -> list[JournalRow]:
    third = torch.tensor(1 / 3).item()
    return [replace(ROW, batch=Batch(batch), microbatch_losses=(1.5, third * batch)) for batch in batches]


def as_float32(row: JournalRow) -> JournalRow:
    return replace(row, microbatch_losses=tuple(torch.tensor(row.microbatch_losses).tolist()))


def test_a_journal_is_cut_at_its_boundary_and_comes_back_whole(tmp_path: Path) -> None:
    """Rows 4 … 7 written at boundary 6 → rows 4 and 5, every field to the bit."""
    journal = Journal(map(as_float32, rows_of(4, 5, 6, 7)))
    write_journal(
        tmp_path / "x",
        journal,
        job="j",
        boundary=Boundary(6),
        train=JOB.train,
        timeline=Timeline(1),
    )
    again = read_journal(tmp_path / "x", job="j", boundary=Boundary(6), timeline=Timeline(1))
    assert again.rows == journal.rows[:2]
    assert [row.loss for row in again.rows] == [row.loss for row in journal.rows[:2]]
    with pytest.raises(DamagedFileError, match="of boundary 6"):
        read_journal(tmp_path / "x", job="j", boundary=Boundary(7))


def test_a_journal_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    """Rows 4 and 5 under boundary 7 → a batch would be missing: DamagedFileError."""
    write_journal(
        tmp_path / "x",
        Journal(rows_of(4, 5)),
        job="j",
        boundary=Boundary(7),
        train=JOB.train,
        timeline=Timeline(1),
    )
    with pytest.raises(DamagedFileError, match="ends before batch 6, not 7"):
        read_journal(tmp_path / "x", job="j", boundary=Boundary(7))


def test_a_journal_has_each_batch_once_and_in_order() -> None:
    """A row again, or one too far → ValueError; a truncation makes room for it."""
    journal = Journal(rows_of(4, 5, 6))
    for batch in (6, 8):
        with pytest.raises(ValueError, match="goes on with batch 7"):
            journal.append(replace(ROW, batch=Batch(batch)))
    journal.truncate(Boundary(5))
    journal.append(replace(ROW, batch=Batch(5)))
    assert [row.batch for row in journal.rows] == [4, 5]


def test_an_empty_journal_is_a_file_too(tmp_path: Path) -> None:
    """Boundary 0 → no rows, and none come back."""
    write_journal(
        tmp_path / "x",
        Journal(),
        job="j",
        boundary=Boundary(0),
        train=JOB.train,
        timeline=Timeline(1),
    )
    assert len(read_journal(tmp_path / "x", job="j", boundary=Boundary(0))) == 0
