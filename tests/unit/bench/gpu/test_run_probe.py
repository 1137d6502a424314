"""One probe of `make gpu` never stops the others: it may fail, hang, or leave children."""

import os
import select
import sys
from contextlib import suppress
from pathlib import Path

import gpu.run_probe
import pytest
from gpu.run_probe import last_json, run_probe


def python(code: str) -> list[str]:
    """A probe."""
    return [sys.executable, "-c", code]


def test_the_last_json_line_counts_even_if_the_probe_missed_its_own_bar(tmp_path: Path) -> None:
    """Lines for people come before it, and one after it."""
    log = tmp_path / "log"
    code = "print('{\"a\": 1}'); print('{\"a\": 2}'); print('done'); raise SystemExit(1)"
    result = run_probe(python(code), limit_s=60.0, environment=os.environ, log=log)
    assert (dict(result.figures), result.trouble) == ({"a": 2}, "")
    assert "exit status 1" in log.read_text()


def test_a_probe_that_dies_is_told_by_its_last_words() -> None:
    """An exception without any figure."""
    result = run_probe(python("raise RuntimeError('no memory')"), limit_s=60.0, environment=os.environ)
    assert result.figures == {}
    assert result.trouble == "exit status 1: RuntimeError: no memory"


def test_a_probe_that_dies_keeps_what_it_has_measured() -> None:
    """A figure, then an exception: the rows that are missing say why."""
    code = "print('{\"a\": 1}'); import sys; print('RuntimeError: no link', file=sys.stderr); raise SystemExit(70)"
    result = run_probe(python(code), limit_s=60.0, environment=os.environ)
    assert (dict(result.figures), result.trouble) == ({"a": 1}, "exit status 70: RuntimeError: no link")


def test_a_probe_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first figure counts. It ignores SIGTERM. Neither it nor its child is left."""
    monkeypatch.setattr(gpu.run_probe, "ENDING_S", 0.2)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('{\"pid\": %d}' % child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    result = run_probe(python(code), limit_s=1.0, environment=os.environ)
    assert result.trouble == "not done after 1 s"
    with suppress(ProcessLookupError):
        child = os.pidfd_open(int(str(result.figures["pid"])))
        ended, _, _ = select.select([child], [], [], 30.0)  # readable once it has ended
        os.close(child)
        assert ended


@pytest.mark.parametrize("text", ["", "no json", "{not json}", "[1, 2]", "{'a': 1}"])
def test_a_text_without_an_object_has_no_figures(text: str) -> None:
    """Nor is a list one."""
    assert last_json(text) is None
