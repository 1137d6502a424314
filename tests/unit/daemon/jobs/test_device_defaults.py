"""What a job file leaves open is decided once, by the devices of the cluster: cards compute in bfloat16."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.device_defaults import (
    attention_backend,
    for_devices,
    what_was_filled_in,
    why_float32,
    with_device_defaults,
    with_those_of,
)
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.jobs.resolve import resolve_job
from headway.daemon.local.demo import DEMO_JOB
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec

CPU = Device(kind="cpu")
T4, A100, H100 = (Device(kind="cuda", capability=capability) for capability in ("7.5", "8.0", "9.0"))
UNKNOWN = Device(kind="cuda")
NAMED = "[job]\nname = 'j'\n"
LARGE = "[model]\nvocab_size = 128256\n[train]\nmicrobatch_size = 1\nsequence_length = 8192\n"


def filled_in(text: str, devices: list[Device]) -> JobSpec:
    """What a job file becomes in a cluster."""
    named = set[str]()
    spec = parse_job(NAMED + text, named=named)
    return for_devices(spec, devices, source="job.toml", named=named)


def test_on_cards_an_open_job_computes_in_bfloat16() -> None:
    """Neither dtype nor Newton–Schulz nor attention nor chunks are named → bfloat16, its kernel, logits by parts."""
    job = filled_in(LARGE, [A100, H100])
    assert job.train.dtype == job.optim.matrices.newton_schulz_dtype == "bfloat16"
    assert job.train.attention_backend == "flash"
    assert job.train.loss_chunk == 2048
    assert job.train.loss_chunk * 128_256 <= 1 << 28
    assert (job.optim.matrices.momentum_dtype, job.optim.error_feedback_dtype) == ("float32", "float32")
    assert not job.train.allow_tf32


@pytest.mark.parametrize("devices", [[CPU], [CPU, H100], [T4], [H100, UNKNOWN], []])
def test_elsewhere_a_job_keeps_its_bits(devices: list[Device]) -> None:
    """A CPU, an older card, or one that does not say what it is, among the devices → the job of before."""
    job = filled_in(LARGE, devices)
    assert replace(job, train=replace(job.train, attention_backend="auto")) == parse_job(NAMED + LARGE)


@pytest.mark.parametrize(
    ("text", "dtype", "newton_schulz", "chunk"),
    [
        ('dtype = "float32"', "float32", "bfloat16", 2048),
        ("loss_chunk = 0", "bfloat16", "bfloat16", 0),
        ("compile = true", "bfloat16", "bfloat16", 2048),
        ('[optim]\nmatrices = { name = "muon", newton_schulz_dtype = "float32" }', "bfloat16", "float32", 2048),
        ('[optim]\nmatrices = { name = "lion" }', "bfloat16", "float32", 2048),
    ],
)
def test_a_key_that_is_named_stays(text: str, dtype: str, newton_schulz: str, chunk: int) -> None:
    """Each key counts by itself, also where it names what a CPU would get."""
    job = filled_in(LARGE + text, [H100])
    found = job.train.dtype, job.optim.matrices.newton_schulz_dtype, job.train.loss_chunk
    assert found == (dtype, newton_schulz, chunk)


@pytest.mark.parametrize(
    ("text", "devices", "why"),
    [
        ("", [H100, T4], "1 of 2 devices have no products in bfloat16 (compute capability 7.5)"),
        ("", [H100, CPU, T4, T4], "3 of 4 devices have no products in bfloat16 (compute capability 7.5, cpu)"),
        ("", [H100, A100], ""),
        ("", [CPU, T4], ""),
        ("[train]\ndtype = 'float32'", [H100, T4], ""),
        ("[train]\ndtype = 'bfloat16'", [H100, T4], ""),
    ],
)
def test_submit_says_which_devices_keep_a_job_in_float32(text: str, devices: list[Device], why: str) -> None:
    """Not where the file names the dtype, or where all devices are alike in it."""
    named = set[str]()
    spec = with_device_defaults(parse_job(NAMED + text, named=named), devices, named=named)
    said = why_float32(spec, devices, named=named)
    assert said.removeprefix("the job computes in float32, because ").partition(";")[0] == why
    assert why_float32(spec, devices, named=None) == ""


def test_plans_choose_what_open_jobs_compute_again() -> None:
    """On cards, unless the file names it; a CPU has no limit that a plan would need it for."""
    choices = ("", "[train]\nrecompute = 'none'", "[train]\nrecompute = 'block'")
    assert [filled_in(text, [H100]).train.recompute for text in choices] == ["auto", "none", "block"]
    assert filled_in("", [CPU]).train.recompute == "none"
    assert filled_in("[train]\ncompile = true", [H100]).train.recomputes == ("elementwise", "attention", "block")


def test_few_logits_need_no_chunks() -> None:
    """A vocabulary of bytes → all rows at once; the largest vocabulary → still as many rows as a product needs."""
    assert filled_in("", [H100]).train.loss_chunk == 0
    assert filled_in(LARGE.replace("8192", "2048"), [H100]).train.loss_chunk == 0
    assert filled_in(LARGE.replace("128256", str(1 << 20)), [H100]).train.loss_chunk == 256


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "chunks"),  # 8,192 tokens of 256 values: the gradients of all logits are larger than two such matrices
        ("[model]\nhidden_size = 4096", "whole"),
        ("[model]\nhidden_size = 2720", "chunks"),  # 2 · 8,192 > 6 · 2,720
        ("[model]\nhidden_size = 2736", "whole"),
        ("[model]\nhidden_size = 4096\n[adapter]\nrank = 8", "chunks"),
        ("[model]\nhidden_size = 4096\n[train]\nloss_chunk = 0", "chunks"),
        ('[model]\nhidden_size = 4080\n[train]\ndtype = "float32"', "chunks"),  # 4 · 8,192 > 8 · 4,080
        ('[model]\nhidden_size = 4096\n[train]\ndtype = "float32"', "whole"),
        ('[model]\nhidden_size = 4096\n[train]\nloss_chunk = 64\nloss_gradient = "chunks"', "chunks"),
    ],
)
def test_one_product_is_made_where_it_takes_no_more_memory(text: str, found: str) -> None:
    """Than the sum of the chunks' in float32, and a chunk's beside it. Elsewhere, or if it is named, all stays."""
    sizes = {"model": "vocab_size = 128256", "train": "microbatch_size = 1\nsequence_length = 8192"}
    for section, keys in sizes.items():
        head = f"[{section}]\n"
        text = text.replace(head, f"{head}{keys}\n") if head in text else f"{text}\n{head}{keys}\n"
    assert filled_in(text, [H100]).train.loss_gradient == found
    assert filled_in(text, [CPU]).train.loss_gradient == "chunks"


def test_what_was_decided_is_told_and_written(tmp_path: Path) -> None:
    """The record has the values, and nobody who reads it decides again; a spec without a file is left alone."""
    file = tmp_path / "job.toml"
    file.write_text(NAMED)
    given, named = read_job_file(file)
    builtin_corpus(tmp_path)
    resolved = resolve_job(given, job_file=file, devices=[H100], cache_dir=tmp_path, named=named)
    assert decode(encode(resolved), JobSpec) == resolved
    assert what_was_filled_in(given, resolved) == (
        "train.dtype = bfloat16, optim.matrices.newton_schulz_dtype = bfloat16, train.recompute = auto"
    )
    again = resolve_job(resolved, job_file=file, devices=[CPU], cache_dir=tmp_path)
    assert what_was_filled_in(resolved, again) == ""


def test_a_job_from_a_checkpoint_takes_what_it_leaves_open_from_there() -> None:
    """A checkpoint of cards, a new job file that names nothing → bfloat16 everywhere; what it names stays."""
    origin = filled_in(LARGE.replace("[model]\n", "[model]\nhidden_size = 4096\n"), [H100])
    assert origin.train.loss_gradient == "whole"
    for text, chunk in (("", 2048), ("[train]\nloss_chunk = 64", 64)):
        named = set[str]()
        spec = with_those_of(parse_job(NAMED + text, named=named), origin, named=named)
        assert spec.train.dtype == spec.optim.matrices.newton_schulz_dtype == "bfloat16"
        assert spec.train.loss_chunk == chunk
        assert spec.train.loss_gradient == origin.train.loss_gradient
        assert spec.train.recompute == "auto"


@pytest.mark.parametrize(("text", "are_split"), [("", True), ("[placement]\nsplit_blocks = false", False)])
def test_a_continued_job_has_the_layers_of_the_one_before(text: str, *, are_split: bool) -> None:
    """Halves of blocks have files of their own → so it is with whoever says nothing; a file that says more counts."""
    origin = parse_job(NAMED + "[placement]\nsplit_blocks = true")
    named = set[str]()
    spec = with_those_of(parse_job(NAMED + text, named=named), origin, named=named)
    assert spec.placement.split_blocks is are_split


def test_keys_are_named_by_their_section() -> None:
    """A key of another section with the same name does not count."""
    spec = parse_job(NAMED + LARGE)
    assert with_device_defaults(spec, [H100], named={"dtype", "model.dtype"}).train.dtype == "bfloat16"
    assert with_device_defaults(spec, [H100], named={"train.dtype"}).train.dtype == "float32"


OLD_DAEMON = Device(kind="cuda")


def job(head_dim: int, backend: str = "auto", dtype: str = "float32") -> JobSpec:
    """A job of two heads of a width."""
    train = TrainSpec(attention_backend=backend, dtype=dtype)  # type: ignore[arg-type]
    model = ModelSpec(hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=1)
    return JobSpec(job=JobSection(name="j"), model=model, train=train)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "devices", "chosen"),
    [
        (22, "float32", [A100], "math"),
        (22, "float32", [T4], "efficient"),
        (22, "float32", [T4, H100], "math"),
        (24, "float32", [A100, H100, OLD_DAEMON], "efficient"),
        (24, "float32", [CPU], "flash"),
        (24, "float32", [CPU, H100], "math"),
        (24, "float32", [], "flash"),
        (64, "bfloat16", [H100, CPU], "flash"),
        (64, "bfloat16", [H100, T4], "math"),
        (512, "bfloat16", [H100], "efficient"),
        (510, "bfloat16", [H100], "math"),
    ],
)
def test_auto_is_the_fastest_kernel_that_every_device_has(
    head_dim: int, dtype: str, devices: list[Device], chosen: str
) -> None:
    """Shapes, dtype and devices decide; the plain mathematics fits everywhere."""
    assert attention_backend(job(head_dim, dtype=dtype), devices, "job.toml") == chosen


def test_the_demo_has_a_kernel_on_every_card() -> None:
    """Its heads are 22 wide, which the memory-efficient kernel refuses from Ampere on."""
    demo = parse_job(DEMO_JOB, "demo.toml")
    assert demo.model.head_width == 22
    assert attention_backend(demo, [A100, H100], "demo.toml") == "math"


def test_a_named_kernel_that_no_device_has_is_refused_by_key_and_value() -> None:
    """One line: the key, the value, the reason and what to do."""
    with pytest.raises(ConfigError) as caught:
        attention_backend(job(22, "efficient"), [A100, H100], "job.toml")
    assert str(caught.value).replace("\n", " ") == (
        'job.toml:train.attention_backend: "efficient" does not fit this job: on a card in float32 it needs heads of a '
        'multiple of 4, and these have 22; set it to "auto"'
    )


def test_flash3_is_refused_at_submit_where_no_card_has_it() -> None:
    """An H100 without the package → one line; with it the job has it; `auto` never takes it."""
    ours = replace(H100, flash3="3.0 ab")
    with pytest.raises(ConfigError, match='"flash3" does not fit this job: its machine has no package flash_attn_3'):
        attention_backend(job(64, "flash3", dtype="bfloat16"), [H100], "job.toml")
    assert attention_backend(job(64, "flash3", dtype="bfloat16"), [H100, ours], "job.toml") == "flash3"
    assert attention_backend(job(64, dtype="bfloat16"), [ours], "job.toml") == "flash"


def test_a_named_kernel_that_some_device_has_stays() -> None:
    """The plan uses those devices."""
    assert attention_backend(job(24, "efficient"), [CPU, H100], "job.toml") == "efficient"


@pytest.mark.parametrize(("schedule", "k"), [("2bw", 7), ("1f1b", 0)])
def test_an_open_schedule_is_that_of_the_job_which_is_continued(schedule: ScheduleName, k: int) -> None:
    """And the batches without delay that the file names go where there is no delay."""
    plain = JobSpec(job=JobSection(name="j"))
    origin = replace(plain, train=replace(plain.train, schedule=schedule, sync_batches=k))
    given = replace(plain, train=replace(plain.train, schedule="auto", sync_batches=7))
    named = {"train.schedule", "train.sync_batches"}
    assert with_those_of(given, origin, named=named) == origin
