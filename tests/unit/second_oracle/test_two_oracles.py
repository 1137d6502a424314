"""`headway reference` has the bits of docs/numerics.md: those of an oracle that was written from that page alone."""

from pathlib import Path

import pytest
import torch

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from tests.unit.second_oracle.comparison import Bits, by_pipeline, by_reference, by_second_oracle, first_difference
from tests.unit.second_oracle.jobs import CODED_CUTS, CUT, JOBS, SAME_BITS, drawn_job, job_file

SOURCES = """
[[data.sources]]
source = "first"
weight = 0.3
[[data.sources]]
source = "second"
weight = 0.7
"""
JOB_FILES = Path(__file__).resolve().parents[3] / "docs/jobs"


def of_two_sources(text: str) -> str:
    """The job file, with two sources in place of one."""
    return text.replace('[data]\nsource = "data"\n', "") + SOURCES


def is_accepted(text: str) -> bool:
    """Whether the job's options go together."""
    try:
        parse_job(text, "drawn")
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def known() -> dict[str, Bits]:
    """What the second oracle makes of each job of JOBS that it has computed so far."""
    return {}


@pytest.mark.parametrize("name", JOBS)
def test_reference_has_the_bits_of_the_second_oracle(name: str, data: Path, known: dict[str, Bits]) -> None:
    """One job file, read and trained twice by code that has nothing in common → equal losses, equal weights."""
    known[name] = by_second_oracle(JOBS[name], data, coded_cuts=CODED_CUTS)
    found = by_reference(JOBS[name], data, coded_cuts=CODED_CUTS)
    assert found == known[name], first_difference(found, known[name])


@pytest.mark.parametrize("name", CUT)
def test_a_family_cut_everywhere_has_the_bits_of_the_second_oracle(
    name: str, data: Path, known: dict[str, Bits]
) -> None:
    """A stage for each layer → the losses and weights of the plain loops: no option reaches over a cut."""
    torch.set_num_threads(1)  # the second oracle may have computed the job in another test
    expected = known[name] if name in known else by_second_oracle(JOBS[name], data)
    found = by_pipeline(JOBS[name], data, num_stages=4)
    assert found == expected, first_difference(found, expected)


def test_packed_rows_have_the_bits_of_the_second_oracle(packed: Path) -> None:
    """Rows of whole documents with a mask → equal losses, on held-out rows too, and equal weights."""
    text = job_file('loss_mask = "data"\neval_every = 2')
    expected = by_second_oracle(text, packed)
    found = by_reference(text, packed)
    assert found == expected, first_difference(found, expected)


def test_too_few_held_out_rows_have_the_bits_of_the_second_oracle(packed: Path) -> None:
    """Sixteen rows for a microbatch of nineteen, at one and at three stages → equal losses, repeated rows included."""
    text = job_file('microbatches = 2\nloss_mask = "data"\neval_every = 2\neval_microbatches = 1')
    text = text.replace("microbatch_size = 2", "microbatch_size = 19")
    expected = by_second_oracle(text, packed)
    for found in (by_reference(text, packed), *(by_pipeline(text, packed, num_stages=n) for n in (1, 3))):
        assert found == expected, first_difference(found, expected)


def test_epochs_of_packed_rows_have_the_bits_of_the_second_oracle(packed: Path) -> None:
    """Twenty rows, several epochs, another order in each → equal losses and weights."""
    text = job_file('data_order = "epochs"', batches=12)
    expected = by_second_oracle(text, packed)
    found = by_reference(text, packed)
    assert found == expected, first_difference(found, expected)


@pytest.mark.parametrize("loss_mask", ["none", "data"])
def test_several_sources_have_the_bits_of_the_second_oracle(loss_mask: str, data: Path, second: Path) -> None:
    """Rows of two streams by weight, held-out ones too, masked or not → equal losses and weights; others than alone."""
    text = of_two_sources(job_file(f'loss_mask = "{loss_mask}"\neval_every = 2'))
    expected = by_second_oracle(text, data, second)
    found = by_reference(text, data, second)
    assert found == expected, first_difference(found, expected)
    assert found[0] not in (by_reference(text, each)[0] for each in (data, second))
    assert by_pipeline(text, data, second, num_stages=2) == found


def test_several_sources_of_packed_rows_have_the_bits_of_the_second_oracle(packed: Path, packed_second: Path) -> None:
    """Packed rows with masks and documents of two folders → equal losses, on held-out rows too, and equal weights."""
    text = of_two_sources(job_file('loss_mask = "data"\ndocuments = "separate"\neval_every = 2'))
    expected = by_second_oracle(text, packed, packed_second)
    found = by_reference(text, packed, packed_second)
    assert found == expected, first_difference(found, expected)


def test_every_setting_makes_a_difference(data: Path, known: dict[str, Bits]) -> None:
    """No two of the jobs have the same losses, so none of their settings goes unread; recompute changes no bit."""
    for name in JOBS.keys() - known.keys():  # the whole module in one process: nothing is left
        known[name] = by_second_oracle(JOBS[name], data, coded_cuts=CODED_CUTS)
    for name, same in SAME_BITS.items():
        assert known[name] == known[same]
    curves = {known[name][0] for name in JOBS.keys() - SAME_BITS.keys()}
    assert len(curves) == len(JOBS) - len(SAME_BITS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_any_job_has_the_bits_of_the_second_oracle(number: int, data: Path) -> None:
    """A job whose fields are drawn, the first of a series that is of some family of Hugging Face."""
    text = next(text for text in (drawn_job(60 * k + number) for k in range(60)) if is_accepted(text))
    expected = by_second_oracle(text, data, coded_cuts=CODED_CUTS[-1:])
    found = by_reference(text, data, coded_cuts=CODED_CUTS[-1:])
    assert found == expected, first_difference(found, expected) + text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "batches", "source"),
    [("small.toml", 40, "headway-docs"), ("demo.toml", 4, "python-stdlib"), ("reference.toml", 2, "python-stdlib")],
    ids=lambda value: str(value),
)
def test_documented_jobs_have_the_bits_of_the_second_oracle(file: str, batches: int, source: str) -> None:
    """The first batches of the jobs that the documentation shows, on the built-in data."""
    lines = (JOB_FILES / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join(f"batches = {batches}" if line.startswith("batches =") else line for line in lines)
    shards = data_folder(source, default_cache_dir())
    expected = by_second_oracle(text, shards)
    found = by_reference(text, shards)
    assert found == expected, first_difference(found, expected)
