"""No control character in what others wrote reaches a terminal, whichever way it is printed."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from headway.daemon.base.logging import configure_logs
from headway.daemon.base.terminal import PrintableStream, console, printable, printable_streams
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import EventRecord, Phase, PhaseRecord
from headway.daemon.decide.cluster_view import ClusterView

ROOT = Path(__file__).resolve().parents[4]
Headway = Callable[..., tuple[int, str, str]]
EVIL = "a\x1b[2J\x1b]0;title\x07\r\x9b1A\u202eb"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@given(st.text(st.characters()))
def test_printed_text_has_no_control_characters(text: str) -> None:
    """Any text: no escape, once is as good as twice, and JSON stays the same document."""
    shown = printable(text)
    assert CONTROL.search(shown) is None
    assert printable(shown) == shown
    written = json.dumps(text, ensure_ascii=False)
    assert json.loads(printable(written)) == text


def test_a_table_is_cut_to_its_width_as_it_is_shown() -> None:
    """rich's own colours stay, a text's escapes do not, and no line is wider than the screen."""
    stream = io.StringIO()
    screen = console(PrintableStream(stream), width=20)  # type: ignore[arg-type]
    screen.print(Text(EVIL * 3, no_wrap=True, overflow="crop"))
    assert CONTROL.search(stream.getvalue()) is None
    assert max(map(len, stream.getvalue().splitlines())) <= 20


@pytest.mark.parametrize("command", [("jobs",), ("status",), ("status", "demo"), ("events", "demo"), ("nodes",)])
def test_text_from_etcd_sends_no_escapes_to_the_terminal(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A reason, an event, a site and a device with escape sequences, through every command that shows them."""
    view: ClusterView = fake_cluster.cluster_view()
    node = fake_cluster.node("a")
    device = replace(node.devices[0], model=EVIL)
    for number, (key, record) in enumerate(
        {
            Keys.of("demo", "phase"): PhaseRecord(phase=Phase.RUNNING, reason=EVIL, error=EVIL, generation=3),
            Keys.event("demo", 7): EventRecord(at=1.0, text=EVIL, generation=3),
            Keys.node("a"): replace(node, site=EVIL, address=EVIL, devices=(device,)),
        }.items()
    ):
        view.apply(key, encode(record), mod_revision=1000 + number, create_revision=1)
    monkeypatch.setattr(fake_cluster, "cluster_view", lambda: view)
    code, out, err = headway(*command)
    assert code == 0
    assert "u001b[2J" in out
    assert CONTROL.search(out + err) is None


def test_an_error_message_sends_no_escapes_to_the_terminal(headway: Headway, tmp_path: Path) -> None:
    """The name of a file, the key of a job file."""
    code, out, err = headway("reference", str(tmp_path / EVIL), "--out", "out")
    assert code == 2
    assert "u001b[2J" in err
    assert CONTROL.search(out + err) is None


def test_a_daemons_log_sends_no_escapes_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a peer said, in the log for people: colours are ours, the peer's escapes are not."""
    import structlog

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with printable_streams():
        configure_logs("info", "console", node="a")
        try:
            structlog.get_logger().warning("peer_said", text=EVIL)
            try:
                raise ValueError(EVIL)
            except ValueError:
                structlog.get_logger().exception("peer_raised")
        finally:
            structlog.reset_defaults()
    said = stream.getvalue()
    assert "\\u001b[2J" in said
    assert "\x1b[2J" not in said
    assert "\x07" not in said


def test_only_one_place_makes_consoles() -> None:
    """The consoles of rich and the streams behind ours are taken from daemon/base/terminal.py."""
    made = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "daemon").rglob("*.py"))
        if re.search(r"\bConsole\(|sys\.__std", path.read_text())
    ]
    assert made == []
