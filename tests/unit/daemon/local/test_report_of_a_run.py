"""The report of a run is an extra: the run does not end by it."""

from pathlib import Path
from typing import Any

import pytest

from headway.daemon.local import run
from headway.daemon.local.run import draw_report


async def test_a_report_that_fails_costs_the_report_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No metrics, or a bug while drawing: one line says so, and the run goes on to its model."""

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    session: Any = None
    assert await draw_report(session, "demo", tmp_path, None) is None
    assert "no report: ConfigError" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(run, "draw_job", broken)
    assert await draw_report(session, "demo", tmp_path, None) is None
    assert "no report: ZeroDivisionError: a bug" in capsys.readouterr().err
