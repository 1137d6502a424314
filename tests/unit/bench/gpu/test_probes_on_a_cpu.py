"""The probes' code runs before a card has it: the quick ones on the CPU, in this process or in children."""

import json
from pathlib import Path

import pytest
import torch
from gpu import __main__ as command
from gpu import cards, idle_share
from gpu.card_facts import CHANGING, NOT_HERE, card_facts
from gpu.cluster_job import stage_job
from gpu.probes import PROBES, Probe, chosen
from gpu.rows import ProbeResult, Row, Verdict, is_all_well, judge

from headway.daemon.cluster.records import Device

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


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_a_probe_on_the_cpu_has_a_figure_for_each_row(probe: Probe, tmp_path: Path) -> None:
    """Small sizes, the same code. Its speeds say nothing; none is missing, and what holds on any device holds."""
    rows, _ = command.measure([probe], device="cpu", logs=tmp_path)
    assert is_all_well(rows), [(row.row.name, row.verdict, row.reason) for row in rows]


def test_one_card_says_what_it_lacks_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of several cards is skipped with its reason, and no cluster is started."""
    monkeypatch.setattr(cards, "num_cards", lambda _: 1)
    figures = {key: value for part in cards.measure("cuda") for key, value in part.items()}
    (probe,) = chosen(["cards"])
    judged = [judge(row, ProbeResult(figures=figures, seconds=0.0)) for row in probe.rows]
    assert {(row.verdict, row.reason.partition(";")[2]) for row in judged} == {(Verdict.SKIPPED, " here: 1")}


def test_a_job_for_cards_is_what_submit_makes_of_it() -> None:
    """A job that names no dtype: everything is in bfloat16 there, Newton–Schulz too, and the plan chooses the rest."""
    job = stage_job("cards", "cpu", 10, devices=(Device(kind="cuda", capability="9.0"),))
    assert (job.train.dtype, job.optim.matrices.newton_schulz_dtype) == ("bfloat16", "bfloat16")
    assert (job.train.recompute, job.train.attention_backend, job.train.sync_batches) == ("auto", "flash", 0)


def test_facts_that_a_cpu_lacks_have_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no CUDA in torch: one line each, and no failure."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = card_facts()
    assert {"driver", "nccl", "cublas", "clocks", "power", "topology", "xid"} <= facts.keys()
    assert all(text.startswith(NOT_HERE) and "\n" not in text for text in facts.values()), facts
    assert set(card_facts(CHANGING)) == set(CHANGING)


def test_a_fact_that_cannot_be_asked_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver that knows no ECC, and a kernel's log with an Xid between other lines."""
    for name, script in {
        "nvidia-smi": 'case "$*" in *ecc*) echo "ecc is not a valid field" >&2; exit 2;; *) echo "answer to $*";; esac',
        "dmesg": 'echo boot; echo "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus"; echo more',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = card_facts()
    assert facts["topology"] == "answer to topo -m"
    assert facts["driver"].startswith("answer to --query-gpu=index,driver_version ")
    assert facts["ecc_errors"] == f"{NOT_HERE}nvidia-smi ecc is not a valid field"
    assert facts["xid"] == "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus"


@pytest.mark.parametrize(("place", "rank"), [("first", 0), ("middle", 1), ("last", 1)])
def test_the_profiled_stage_has_all_blocks(place: idle_share.Place, rank: int) -> None:
    """Its neighbours have what is left."""
    cuts, found = idle_share.cuts_of(place, ("embed", "block.0", "block.1", "head"))
    assert found == rank
    assert {"block.0", "block.1"} <= set(cuts[found])
    assert [name for cut in cuts for name in cut] == ["embed", "block.0", "block.1", "head"]
