"""Writers of a job's history, read back by the readers of the tools that they write for."""

import json
import math
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.reports.metrics_file import ROW_NAMES, HistoryRow
from headway.daemon.reports.writers import opened, wandb_records
from headway.stages.errors import MissingPackageError

UID = "0123456789abcdef"


def _row(batch: int) -> HistoryRow:
    """Return a row whose floats need each of their bits; of some batches less is known, and two have diverged."""
    return HistoryRow(
        batch=batch,
        loss={5: math.nan, 6: math.inf}.get(batch) or math.log(batch + 2) / 3,
        learning_rate=0.1 / (batch + 3),
        tokens=4096,
        seconds=1 / 3,
        generation=1 + batch // 4,
        eval_loss=math.pi / (batch + 1) if batch % 3 == 0 else None,
        gradient_norm=None if batch % 2 else 1e-300,
        final_eval_loss=math.e / 7 if batch == 7 else None,
    )


ROWS = [_row(batch) for batch in range(8)]


def _write(rows: list[HistoryRow], *, uid: str = UID, **where: Any) -> None:
    with opened("my-job", uid, **where) as write:
        for row in rows:
            write(row)


def _tear(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _in_tensorboard(folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the bits of float32 by tag and step; a step that is there twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in read.Tags()["scalars"]:
        events = read.Scalars(tag)
        found[tag] = {event.step: struct.pack("f", event.value) for event in events}
        assert len(found[tag]) == len(events)
    return found


def _expected() -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {}
    for row in ROWS:
        for name, value in row.as_dict().items():
            if name != "batch":
                found.setdefault(name, {})[row.batch] = struct.pack("f", value)
    return found


def test_tensorboard_has_each_value_once_over_a_writer_that_died(tmp_path: Path) -> None:
    """Its own reader finds every float32. The first writer's last record is torn; the second writes it again."""
    _write(ROWS[:5], tensorboard=tmp_path)
    (first,) = (tmp_path / "my-job").iterdir()
    _tear(first, 3)
    _write(ROWS, tensorboard=tmp_path)
    assert _in_tensorboard(tmp_path / "my-job") == _expected()
    _write(ROWS, tensorboard=tmp_path)
    assert len([*(tmp_path / "my-job").iterdir()]) == 2


def test_wandb_has_each_digit_once_over_a_writer_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline. The first writer's file ends within a batch, as after a full disk; the second writes that batch again.

    A record that is longer than a block of the file, before the rows, hides none.
    """
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_NOTES", "x" * 70_000)
    _write(ROWS[:5], wandb="offline")
    (first,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    whole = first.read_bytes()
    first.write_bytes(whole[: whole.index(repr(ROWS[4].loss).encode()) + 5])
    earlier = first.parent.rename(first.parent.with_name("offline-run-20260101_000000-headway-" + UID))
    _write(ROWS, wandb="offline")
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        for record in wandb_records(path)
        if record.HasField("history")
    ]
    found = [{name: repr(row[name]) for name in row if name in ROW_NAMES} | {"batch": row["_step"]} for row in rows]
    assert found == [
        {name: repr(value) for name, value in row.as_dict().items()} | {"batch": row.batch} for row in ROWS
    ]
    earlier.joinpath("damaged.wandb").write_bytes(whole[:7] + struct.pack("<IHB", 0, 9, 1) + b"\xff" * 9)
    with pytest.raises(ConfigError, match=r"damaged\.wandb.*record 1 is damaged; move its folder away"):
        _write(ROWS, wandb="offline")


def test_a_file_of_lines_goes_on_and_has_each_digit(tmp_path: Path) -> None:
    """The first writer's last line is torn; the second writes it again."""
    path = tmp_path / "rows.jsonl"
    _write(ROWS[:8], jsonl=path)
    _tear(path, 3)
    _write(ROWS, jsonl=path)
    assert path.read_text().splitlines() == [row.as_json() for row in ROWS]


def test_nothing_is_mixed_with_another_jobs_rows(tmp_path: Path) -> None:
    """A folder or a file of another job is named and stays as it is: else the writer would skip what it has."""
    path = tmp_path / "rows.jsonl"
    _write(ROWS, jsonl=path, tensorboard=tmp_path)
    before = path.read_bytes(), _in_tensorboard(tmp_path / "my-job")
    other = HistoryRow(batch=1, loss=0.5, learning_rate=0.1, tokens=1, seconds=1.0, generation=1)
    with pytest.raises(ConfigError, match=r"loss 0\.366\d+ for batch 1, which is 0\.5"):
        _write([ROWS[0], other], jsonl=path)
    with pytest.raises(ConfigError, match="is of another job; name another folder"):
        _write([other], uid="fedcba9876543210", tensorboard=tmp_path)
    assert (path.read_bytes(), _in_tensorboard(tmp_path / "my-job")) == before


def test_a_file_that_is_no_metrics_file_is_not_emptied(tmp_path: Path) -> None:
    """Its only line has no end, as that of a secret: it is not taken for a row that a death has torn."""
    path = tmp_path / "token"
    for content in (b"hf_abcdef", b"{}"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="line 1 is not a batch's metrics"):
            _write(ROWS, jsonl=path)
        assert path.read_bytes() == content
    path.write_bytes(b'{"bat')
    _write(ROWS, jsonl=path)
    assert len(path.read_text().splitlines()) == len(ROWS)


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file in the place of a folder."""
    (tmp_path / "taken").write_text("")
    places: list[dict[str, Any]] = [{"jsonl": tmp_path / "taken/rows.jsonl"}, {"tensorboard": tmp_path / "taken"}]
    for where in places:
        with pytest.raises(ConfigError, match=f"^--{next(iter(where))} .*taken.*: cannot be written: ") as raised:
            _write(ROWS, **where)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("num_rows", [12, 500])
@pytest.mark.parametrize("tool", ["jsonl", "tensorboard"])
def test_a_full_disk_is_one_line(tmp_path: Path, tool: str, num_rows: int) -> None:
    """The file may have 1000 bytes: the first write that fails is that of a row, and closing fails as well."""
    where: dict[str, Any] = {tool: tmp_path / "there"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=rf"^--{tool} {tmp_path}/there: cannot be written: File too large$"):
            _write([_row(batch) for batch in range(num_rows)], **where)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_wandbs_process_has_not_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of a full disk. Here its file is gone, which leaves as little of the rows."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def lose() -> None:
        with opened("my-job", UID, wandb="offline") as write:
            for row in ROWS:
                write(row)
            (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
            file.unlink()

    with pytest.raises(ConfigError, match=r"^--wandb offline: cannot be written: batches 0 to 7 are not in .*full\?$"):
        lose()


def test_what_goes_wrong_beside_the_writers_is_not_theirs(tmp_path: Path) -> None:
    """Whoever reads the rows' text may leave."""
    with pytest.raises(BrokenPipeError), opened("my-job", UID, jsonl=tmp_path / "rows.jsonl"):
        raise BrokenPipeError


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Nothing is written then."""
    monkeypatch.setitem(sys.modules, package, None)
    where: dict[str, Any] = {package: tmp_path}
    with pytest.raises(MissingPackageError, match=rf"`--{package}` needs .*pip install 'headway\[{package}\]'"):
        _write(ROWS, **where)
    assert not [*tmp_path.iterdir()]
