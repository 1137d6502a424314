"""The folder of the workers' socket: private, short enough for a socket, and cleared of what a killed daemon left."""

import stat
from pathlib import Path

import pytest

from headway.daemon.node.lifecycle import MAX_RUNTIME_DIR_BYTES, _make_runtime_dir


def test_remains_of_a_killed_daemon_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two daemons in a row on one state folder, the first killed: the second has the same folder, empty and private."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("headway.daemon.node.lifecycle.MAX_RUNTIME_DIR_BYTES", 1000)
    first = _make_runtime_dir(tmp_path / "state")
    (first / "workers.sock").touch()
    second = _make_runtime_dir(tmp_path / "state")
    assert second == first
    assert list(second.iterdir()) == []
    assert stat.S_IMODE(second.stat().st_mode) == 0o700
    assert _make_runtime_dir(tmp_path / "other state") != first


def test_a_folder_too_deep_for_a_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime folder's path is too long for a unix socket: a short one is taken."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / ("x" * MAX_RUNTIME_DIR_BYTES)))
    made = _make_runtime_dir(tmp_path)
    made.rmdir()
    assert len(str(made)) <= MAX_RUNTIME_DIR_BYTES


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder would be and cannot be removed as a folder: another name is taken."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("headway.daemon.node.lifecycle.MAX_RUNTIME_DIR_BYTES", 1000)
    first = _make_runtime_dir(tmp_path)
    first.rmdir()
    first.write_text("theirs")
    second = _make_runtime_dir(tmp_path)
    assert second != first
    assert first.read_text() == "theirs"
