"""Jobs that nothing can compute: one line and exit code 2 from each command, never a traceback."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.daemon.client.job_requests import submitter

Headway = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", [("plan", "--nodes", "2"), ("reference", "--out", "out"), ("run", "--out", "out")])
@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("hidden_size = 640000", "model.hidden_size: must be at most 65536, is 640000"),
        ("num_hidden_layers = 50000000", "model.num_hidden_layers: must be at most 1024"),
    ],
)
def test_an_impossible_size_is_one_line(
    headway: Headway, tmp_path: Path, command: tuple[str, ...], model: str, line: str
) -> None:
    """A width or depth that no machine holds is refused by every command that reads the file."""
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "x"\n[model]\n{model}\n')
    name, *flags = command
    code, out, err = headway(name, str(job), *flags)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "bytes_needed"),
    [
        ("[model]\nhidden_size = 65536\nintermediate_size = 65536", "TiB"),
        ("[train]\nmicrobatch_size = 65536\n[model]\nvocab_size = 65536", "TiB"),
    ],
)
def test_the_reference_of_a_job_that_does_not_fit_is_one_line(
    headway: Headway, tmp_path: Path, size: str, bytes_needed: str
) -> None:
    """A model or microbatch of several TiB keeps every rule; the loop that would hold it in one process refuses it."""
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "x"\n{size}\n')
    code, out, err = headway("reference", str(job), "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "job.toml:model: weights, optimizers and one microbatch take" in err
    assert f"{bytes_needed}, and this machine has" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_user_without_a_name_may_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user's number may be in no list of users: the number is written."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert submitter() == f"{os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("command", [("run", "small.toml", "--out"), ("up", "--state-dir")])
def test_a_state_folder_that_no_node_can_have_is_told_at_once(
    headway: Headway, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A path that is no UTF-8: one line before anything is read or made."""
    code, out, err = headway(*command, str(tmp_path / "o\udcff"))
    assert (code, out) == (2, "")
    assert "cannot be the state folder: its path is not UTF-8" in err
    assert "--state-dir" in err
    assert not list(tmp_path.iterdir())
