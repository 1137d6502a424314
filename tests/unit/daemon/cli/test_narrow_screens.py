"""`watch` and `nodes` on screens of 80 and 60 columns, and on one whose size changes."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, ConsoleDimensions

from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.reports.node_list import node_lines
from headway.daemon.reports.watch_view import LiveDisplay, LossHistory, Snapshot, alike, fitted, render, snapshot
from headway.daemon.view.cluster_view import ClusterView
from tests.unit.daemon.cli import fake_cluster

LONG = "gpu-node-17.frankfurt.example.com"
MODEL = "Xeon-8481C-AVX512"


def wide_view() -> ClusterView:
    """The fake cluster, and a node of long names with four devices of one model."""
    view = fake_cluster.cluster_view()
    node = fake_cluster.node("a")
    devices = tuple(replace(node.devices[0], index=index, model=MODEL) for index in range(4))
    record = replace(
        node, name=LONG, address=f"{LONG}:7070", site="frankfurt-rack-7", devices=devices, is_draining=True
    )
    view.apply(Keys.node(LONG), encode(record), mod_revision=5000, create_revision=5000)
    return view


def wide_snapshot() -> Snapshot:
    found = snapshot(wide_view(), "demo", LossHistory())
    assert found is not None
    return found


@pytest.mark.parametrize("width", [80, 60, 40])
def test_watch_shows_every_number_on_a_narrow_screen(width: int) -> None:
    """Nothing is cut off at the right: batch, loss, rate, time left, the node's name; no line is too wide."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(wide_snapshot(), width=width))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for fact in ("batch 50/150", "provisional from 0", "loss 2.5000", "4,096 tokens/s", "1:40 left"):
        assert fact in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [80, 60])
def test_nodes_fit_a_narrow_screen(width: int) -> None:
    """A node's facts on several lines, indented, each of them whole."""
    lines = node_lines(wide_view(), width=width)
    assert max(map(len, lines)) <= width
    for fact in (LONG, f"{LONG}:7070", "site frankfurt-rack-7", f"4 × cpu {MODEL}", "(draining)"):
        assert any(fact in line for line in lines), fact
    assert len([line for line in lines if not line.startswith(" ")]) == 3


def test_in_a_pipe_a_node_is_one_line() -> None:
    """Programs read one line a node, however long."""
    assert len(node_lines(wide_view())) == 3
    assert alike(["H200"] * 8 + ["cpu"]) == "8 × H200, cpu"


@given(st.lists(st.text("ab ", max_size=30), max_size=6), st.integers(20, 60))
def test_no_part_is_lost(parts: list[str], width: int) -> None:
    """Whatever the parts, every letter is shown, in order; words that fit are not broken."""
    lines = fitted(parts, width)
    assert "".join("".join(lines).split()) == "".join("".join(parts).split())


def test_a_resized_terminal_shows_one_picture() -> None:
    """80 columns, then 60: the screen is emptied before the new picture is drawn, in its width; once, not each time."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=40, _environ={})
    console._force_terminal = True
    with LiveDisplay(console) as display:
        display.show(wide_snapshot())
        display._live.refresh()
        assert "\x1b[2J" not in stream.getvalue()
        before = len(stream.getvalue())
        console.size = ConsoleDimensions(60, 40)
        display._live.refresh()
        after = stream.getvalue()[before:]
        assert after.index("\x1b[2J") < after.index("headway")
        rows = [line for line in after.splitlines() if "╭" in line or "╰" in line]
        assert len(rows) == 2
        assert all(line.count("─") <= 58 for line in rows)
        display._live.refresh()
        assert stream.getvalue().count("\x1b[2J") == 1
