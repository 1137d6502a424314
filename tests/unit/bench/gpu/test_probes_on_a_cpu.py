"""The probes' code runs before a card has it: the quick ones on the CPU, in this process or in children."""

import importlib
import json
from pathlib import Path

import pytest
from gpu import __main__ as command
from gpu import idle_share
from gpu.probes import PROBES, Probe
from gpu.rows import ProbeResult, Row, Verdict, judge

pytestmark = pytest.mark.timeout(300)


def test_without_a_card_the_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit status 2, and nothing is written."""
    monkeypatch.setattr(command, "card_names", lambda: ())
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "no CUDA device: " in said.err
    assert 'make gpu GPU="--device cpu"' in said.err
    assert not (tmp_path / "out").exists()


def test_a_probe_that_fails_leaves_the_rows_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first one dies; table and JSON have both, and the exit status is 1."""
    probes = (
        Probe(name="bad", arguments=("-c", "raise MemoryError"), limit_s=60.0, rows=(Row(name="bad", key="x"),)),
        Probe(
            name="good",
            arguments=("-c", "import sys; print('{\"device\": %d}' % (sys.argv[1:] == ['--device', 'cpu']))"),
            limit_s=60.0,
            rows=(Row(name="good", key="device", least=1),),
        ),
    )
    monkeypatch.setattr(command, "chosen", lambda _names: probes)
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    records = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(record["name"], record["verdict"]) for record in records] == [("bad", "failed"), ("good", "ok")]
    assert "MemoryError" in (tmp_path / "bad.log").read_text()
    assert "says nothing of a card" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["first_operations", "idle_share", "memory", "links", "stages", "snapshots"])
@pytest.mark.slow
def test_a_probe_on_the_cpu_has_a_figure_for_each_row(module: str) -> None:
    """Small sizes, the same code. Its figures say nothing, but none is missing."""
    probe = next(probe for probe in PROBES if probe.arguments[-1] == f"gpu.{module}")
    figures = importlib.import_module(f"gpu.{module}").measure("cpu")
    result = ProbeResult(figures=json.loads(json.dumps(figures)), seconds=0.0)
    verdicts = {row.name: judge(row, result).verdict for row in probe.rows}
    assert Verdict.FAILED not in verdicts.values(), verdicts


@pytest.mark.parametrize(("place", "rank"), [("first", 0), ("middle", 1), ("last", 1)])
def test_the_traced_stage_has_all_blocks(place: idle_share.Place, rank: int) -> None:
    """Its neighbours have what is left."""
    cuts, found = idle_share.cuts_of(place, ("embed", "block.0", "block.1", "head"))
    assert found == rank
    assert {"block.0", "block.1"} <= set(cuts[found])
    assert [name for cut in cuts for name in cut] == ["embed", "block.0", "block.1", "head"]
