"""The etcd to run is the first of a flag, a variable, the extra and PATH."""

import sys
from importlib import util
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.binary import binary_release, find_etcd_binary, remark


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """An executable file called etcd."""
    path = tmp_path / "bin" / "etcd"
    path.parent.mkdir()
    path.touch(mode=0o755)
    return path


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the `local` extra."""
    monkeypatch.setattr(util, "find_spec", lambda _: None)


def test_the_flag_goes_before_the_variable_the_extra_and_the_path(
    executable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is taken where those before it name none."""
    other, on_path = tmp_path / "other", {"PATH": str(executable.parent)}
    other.touch(mode=0o755)
    assert find_etcd_binary(executable, environment={"HEADWAY_ETCD_BINARY": str(other)}) == executable
    assert find_etcd_binary(environment={"HEADWAY_ETCD_BINARY": str(other), **on_path}) == other
    assert find_etcd_binary(environment=on_path).parent.name == "etcdbin", "that of the extra"
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    assert find_etcd_binary(environment=on_path) == executable


@pytest.mark.usefixtures("no_extra")
def test_no_etcd_at_all_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    """Nothing anywhere: ConfigError names all four ways out."""
    with pytest.raises(ConfigError) as error:
        find_etcd_binary(environment={"PATH": str(tmp_path)})
    message = str(error.value)
    assert "\n" not in message
    assert all(way in message for way in ("--etcd-binary", "HEADWAY_ETCD_BINARY", "headway[local]", "PATH"))


@pytest.mark.parametrize("source", ["--etcd-binary", "HEADWAY_ETCD_BINARY"])
def test_a_named_binary_that_is_not_there_is_not_replaced_by_another(tmp_path: Path, source: str) -> None:
    """A wrong flag or variable: ConfigError names it and the path, although the extra has an etcd."""
    missing = tmp_path / "missing"
    chosen = missing if source == "--etcd-binary" else None
    with pytest.raises(ConfigError, match=source) as error:
        find_etcd_binary(chosen, environment={"HEADWAY_ETCD_BINARY": str(missing)})
    assert str(missing) in str(error.value)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.4.23", False), ("3.5.0", True), ("3.5.2", True), ("3.5.3", False), ("3.6.0", False), ("", False)],
)
def test_an_etcd_that_loses_writes_is_told_of(version: str, expected: bool) -> None:
    """A version that says nothing is not guessed at."""
    assert bool(remark(version)) is expected


def test_a_binary_says_its_release(tmp_path: Path) -> None:
    """As etcd prints it; a program that says something else has none."""
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\nprintf 'etcd Version: 3.5.1\\nGit SHA: e8732fb5f\\n'\n")
    binary.chmod(0o755)
    assert binary_release(binary) == "3.5.1"
    assert binary_release(Path(sys.executable)) == ""
    assert binary_release(tmp_path / "nowhere") == ""
