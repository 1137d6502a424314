"""`headway chaos` refuses what it cannot do in one line, and does the rest to a real cluster."""

from pathlib import Path

import pytest

from headway.daemon.cli import run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--faults", "maim"), "there are: kill, "),
        (("--faults", "partition"), "`link-cut`"),
        (("--rate", "often"), "6/min"),
        (("--for", "ever"), "90s"),
    ],
)
def test_bad_options_are_told(arguments: tuple[str, str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2, before any cluster is looked for."""
    assert run(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_without_a_cluster_there_is_nothing_to_strike_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--cluster", str(tmp_path)]) == 3
    assert "headway up" in capsys.readouterr().err
