"""`headway status` says in one sentence which arithmetic a job computes with."""

import io
from dataclasses import replace

from rich.console import Console

from headway.daemon.jobs.device_defaults import for_devices
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.records import Device
from headway.daemon.reports.job_report import arithmetic_settings
from headway.daemon.reports.watch_view import Snapshot, render
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import TrainSpec
from tests.unit.daemon.cli.test_displays import report

PLAIN = JobSpec(job=JobSection(name="j"))


def test_a_job_on_a_cpu() -> None:
    """The defaults, resolved for CPUs."""
    spec = for_devices(PLAIN, [Device(kind="cpu")], source="j", named=set())
    assert arithmetic_settings(spec) == (
        "computes in float32, Newton–Schulz in float32, attention by flash, TF32 off, 1 thread per worker; "
        "all algorithms are deterministic"
    )


def test_an_open_job_on_cards_says_what_the_cards_decided() -> None:
    """bfloat16 with masters, chunks, narrow state and two threads."""
    open_job = replace(
        PLAIN,
        model=replace(PLAIN.model, vocab_size=128_256),
        train=TrainSpec(sequence_length=8192, threads=2),
        optim=OptimSpec(matrices=GroupSpec(name="muon", momentum_dtype="bfloat16"), error_feedback_dtype="bfloat16"),
    )
    spec = for_devices(open_job, [Device(kind="cuda", capability="9.0")], source="j", named=set())
    assert arithmetic_settings(spec) == (
        "computes in bfloat16 with float32 masters, Newton–Schulz in bfloat16, momentum and error feedback kept in "
        "bfloat16, attention by flash, logits of 512 tokens at once, TF32 off, 2 threads per worker; all algorithms "
        "are deterministic"
    )


def test_every_setting_that_changes_bits_is_told() -> None:
    """Two jobs of unlike arithmetic have unlike sentences; state that no update uses is left out."""
    trains = [
        TrainSpec(),
        TrainSpec(dtype="bfloat16"),
        TrainSpec(allow_tf32=True),
        TrainSpec(attention_backend="math"),
        TrainSpec(loss_chunk=7),
        TrainSpec(compile=True),
        TrainSpec(threads=3),
    ]
    told = {arithmetic_settings(replace(PLAIN, train=train)) for train in trains}
    assert len(told) == len(trains)
    synchronous = replace(PLAIN, train=TrainSpec(schedule="1f1b"), optim=OptimSpec(error_feedback_dtype="bfloat16"))
    assert "error feedback" not in arithmetic_settings(synchronous)


def test_the_page_shows_it_below_the_verdict() -> None:
    """One line after `exact: yes`."""
    console = Console(file=io.StringIO(), width=200, height=60)
    told = replace(report(3), exact_reason="one class", arithmetic=arithmetic_settings(PLAIN))
    console.print(render(Snapshot(report=told), width=200, height=60))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "arithmetic: computes in float32" in shown
    assert shown.index("exact: yes") < shown.index("arithmetic:")
