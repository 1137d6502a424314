"""Fault points strike where and as often as the file says, and never when no file is named."""

import json
from pathlib import Path

import pytest

from headway.daemon.base import fault_points
from headway.daemon.base.fault_points import FaultPoints, InjectedFaultError


def write(path: Path, *faults: dict[str, object]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    draft.replace(path)


def test_it_strikes_at_its_place_with_its_facts_once(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    write(path, {"id": "a", "at": "operation", "when": {"batch": 7}, "do": "raise"})
    points = FaultPoints(path)
    points.at("operation", batch=6)
    points.at("load", batch=7)
    with pytest.raises(InjectedFaultError, match="injected fault a"):
        points.at("operation", batch=7, stage=1)
    points.at("operation", batch=7)
    FaultPoints(path).at("operation", batch=7)  # nor in the process that comes after
    (struck,) = (tmp_path / "faults.struck").iterdir()
    assert json.loads(struck.read_text())["stage"] == 1


def test_a_fault_may_strike_several_times(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    write(path, {"id": "a", "at": "operation", "do": "out_of_memory", "times": 2})
    points = FaultPoints(path)
    for _ in range(2):
        with pytest.raises(MemoryError):
            points.at("operation")
    points.at("operation")


def test_a_fault_of_zero_times_strikes_every_time_and_leaves_no_note(tmp_path: Path) -> None:
    """Its action is told of the seconds; a place that the file does not name is not looked at."""
    path, seen = tmp_path / "faults", list[float]()
    points = FaultPoints(path)
    assert not points.names("layer")
    write(path, {"id": "a", "at": "layer", "when": {"op": "backward"}, "do": "note", "seconds": 0.5, "times": 0})
    points.actions["note"] = seen.append
    assert points.names("layer")
    assert not points.names("operation")
    for op in ("forward", "backward", "backward"):
        points.at("layer", op=op)
    assert seen == [0.5, 0.5]
    assert not (tmp_path / "faults.struck").exists()


def test_the_file_may_come_later_and_change(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    points = FaultPoints(path)
    points.at("operation")
    write(path, {"id": "a", "at": "operation", "do": "raise"})
    with pytest.raises(InjectedFaultError):
        points.at("operation")
    write(path, {"id": "b", "at": "load", "do": "raise"})
    with pytest.raises(InjectedFaultError):
        points.at("load")


def test_without_a_file_nothing_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fault_points.ENVIRONMENT, raising=False)
    fault_points.arm()
    assert not fault_points.is_armed()
    fault_points.fault_point("operation", batch=7)


def test_a_file_is_damaged_in_one_bit_or_cut(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(100))
    write(
        tmp_path / "faults",
        {"id": "a", "at": "load", "do": "flip_bit"},
        {"id": "b", "at": "late", "do": "truncate"},
    )
    points = FaultPoints(tmp_path / "faults")
    points.at("load", path=victim)
    assert sum(byte.bit_count() for byte in victim.read_bytes()) == 1
    points.at("late", path=victim)
    assert victim.stat().st_size == 50


def test_a_process_may_offer_actions_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "faults", {"id": "a", "at": "operation", "do": "cut_links", "seconds": 2.5})
    points = FaultPoints(tmp_path / "faults")
    done: list[float] = []
    points.actions["cut_links"] = done.append
    points.at("operation")
    assert done == [2.5]


def test_a_fault_may_wait_for_another(tmp_path: Path) -> None:
    write(
        tmp_path / "faults",
        {"id": "b", "at": "second", "do": "raise", "after": "a"},
        {"id": "a", "at": "first", "do": "raise"},
    )
    points = FaultPoints(tmp_path / "faults")
    points.at("second")
    with pytest.raises(InjectedFaultError, match="a"):
        points.at("first")
    with pytest.raises(InjectedFaultError, match="b"):
        points.at("second")
