"""Where built-in data lies for users of all kinds."""

import os
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.resolve import default_cache_dir, with_data


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says where; files for the moment lie in a folder of their own."""
    for name in ("HEADWAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_a_home_has_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home/.cache/headway"


def test_a_home_that_cannot_be_written_to_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read-only ~/.cache: one line for all calls says where the data goes, and how to choose."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.F_OK)
    own = default_cache_dir()
    assert default_cache_dir() == own
    told = capsys.readouterr().err
    assert told.startswith(
        f"headway: {tmp_path}/home/.cache/headway cannot be written to, so data is kept in {own}; set"
    )
    assert told.count("\n") == 1


def test_without_any_folder_to_write_to_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only root: the line says which variable helps."""
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.F_OK)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc")
    with pytest.raises(ConfigError, match=r"/proc/headway-cache-\d+: cannot be made, nor can .*set HEADWAY_CACHE_DIR"):
        default_cache_dir()


def test_a_user_without_a_home_has_a_folder_for_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a number without a name: a private folder, or one line if somebody else took its name."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    own = default_cache_dir()
    assert own.parent == tmp_path
    assert own.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (tmp_path / "headway-cache-4242").mkdir()
    with pytest.raises(ConfigError, match="belongs to another user; set HEADWAY_CACHE_DIR"):
        default_cache_dir()


def test_a_cache_that_takes_no_built_in_data_is_named(tmp_path: Path) -> None:
    """Full, or a file in its place: the source is no wrong name, and the line says which variable helps."""
    spec = parse_job('[job]\nname = "x"\n[data]\nsource = "headway-docs"\n')
    (tmp_path / "taken").write_text("")
    where = tmp_path / "taken/cache"
    with pytest.raises(
        ConfigError, match=f"^{where}: headway-docs cannot be made there: .*Not a d.*; set HEADWAY_CACHE"
    ):
        with_data(spec, job_file=tmp_path / "job.toml", cache_dir=where)
