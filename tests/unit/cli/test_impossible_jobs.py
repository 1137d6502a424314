"""Jobs that nothing can compute: one line and exit code 2 from each command, never a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_the_reference_of_a_model_that_does_not_fit_is_one_line(headway: Headway, tmp_path: Path) -> None:
    """A model of several TiB keeps every rule; the loop that would hold it in one process says what it needs."""
    job = tmp_path / "job.toml"
    job.write_text('[job]\nname = "x"\n[model]\nhidden_size = 65536\nintermediate_size = 65536\n')
    code, out, err = headway("reference", str(job), "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "job.toml:model: its weights and their optimizers take 4.5 TiB, and this machine has" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
