"""Which results count, and what a folder that is not a study's, or is full, costs."""

import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.changed_keys import job_text
from headway.daemon.jobs.job import JobSpec, OriginPart, OriginSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.study import study_run
from headway.daemon.study.study_file import Cell, Study, parse_study
from headway.daemon.study.study_run import RESULTS_NAME, WHOLE, Row, is_job, open_study, read_results
from headway.stages.errors import NonFiniteLossError
from headway.stages.spec import ModelSpec

STUDY = 'job.name = "a"\nstudy.rates = [1, 3]\noptimizer.muon.train = {}\ntreatment.sync.train = {}\n'
MIXED = 'job.name = "a"\ndata.sources = [{ source = "x", weight = 1.0 }, { source = "y", weight = 3.0 }]\n'


def row(spec: JobSpec, *, factor: float = 1.0, seed: int = 0) -> Row:
    """What a training of a job has left."""
    return Row(
        optimizer="muon",
        treatment="sync",
        factor=factor,
        seed=seed,
        job=job_text(spec, whole=WHOLE),
        loss=1.0,
        losses_sha256="",
        curve=(),
        seconds=1.0,
    )


def test_a_result_of_other_adapters_shares_of_data_or_a_model_elsewhere_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section [adapter], the weights of sources and the folder of a model decide bits, as the other keys do."""

    def opener(_base: Path) -> object:
        def open_model(folder: str, _ignored: Sequence[str]) -> tuple[OriginSpec, ModelSpec]:
            return OriginSpec(url=folder), ModelSpec()

        return open_model

    monkeypatch.setattr(study_run, "model_opener", opener)
    adapted, mixed = parse_job('job.name = "a"\nadapter.rank = 8\n'), parse_job(MIXED)
    begun = replace(parse_job('job.name = "a"\n'), origin=OriginSpec(url="/model", job="a"))
    others = (
        parse_job('job.name = "a"\nadapter.rank = 4\n'),
        parse_job(MIXED.replace("3.0", "2.0")),
        replace(begun, origin=OriginSpec(url="/another", job="a")),
    )
    for spec, other in zip((adapted, mixed, begun), others, strict=True):
        assert is_job(row(spec), spec, jobs=tmp_path)
        assert not is_job(row(spec), other, jobs=tmp_path)


def test_a_result_of_weights_that_have_changed_under_their_path_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts are read once for the whole study. A row of an earlier release says nothing of them, and counts."""
    given, num_read = "1", 0

    def resolved(spec: JobSpec, **_: object) -> JobSpec:
        return replace(spec, origin=OriginSpec(url="/model", job="a"))

    def read_parts(spec: JobSpec) -> JobSpec:
        nonlocal num_read
        num_read += 1
        parts = tuple(OriginPart(name=name, size_bytes=1, checksum=given) for name in spec.layers)
        return replace(spec, origin=replace(spec.origin, parts=parts))

    monkeypatch.setattr(study_run, "resolve_job", resolved)
    monkeypatch.setattr(study_run, "read_parts", read_parts)
    monkeypatch.setattr(study_run, "check_memory", lambda *_: None)
    monkeypatch.setattr(study_run, "model_opener", lambda _: lambda folder, _: (OriginSpec(url=folder), ModelSpec()))
    monkeypatch.setattr(study_run, "_compared", lambda spec: spec.job.name)
    path = tmp_path / "study.toml"
    path.write_text(STUDY + "treatment.delay.train = {}\n")
    cell = Cell(optimizer="muon", treatment="sync", factor=1.0, seed=0)
    before = open_study(path).job(cell)
    given = "2"
    after = open_study(path).job(cell)
    assert num_read == 2
    row = study_run._row(cell, before, [], None, 0.0, jobs=tmp_path)
    old = msgspec.structs.replace(row, weights_sha256="")
    assert [is_job(each, spec, jobs=tmp_path) for each in (row, old) for spec in (before, after)] == [
        *(True, False),
        *(True, True),
    ]


def test_the_job_of_a_training_names_its_plug_ins_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`submit` keeps of a wheel's path its name alone; a job file has the path."""
    resolved = {"plugins.wheel": "own.py", "plugins.sha256": "0" * 64}
    monkeypatch.setattr(study_run, "resolve_job", lambda spec, **_: spec.with_values(resolved))
    monkeypatch.setattr(study_run, "check_memory", lambda *_: None)
    path = tmp_path / "study.toml"
    path.write_text(STUDY + 'plugins.wheel = "code/own.py"\noptim.matrices.name = "own:Sign"\n')
    cell = Cell(optimizer="muon", treatment="sync", factor=1.0, seed=0)
    spec, jobs = open_study(path).job(cell), tmp_path / "out/jobs"
    row = study_run._row(cell, spec, [], None, 0.0, jobs=jobs)
    assert 'plugins.wheel = "../../code/own.py"' in row.job.splitlines()
    assert is_job(row, spec, jobs=jobs)


def test_results_of_other_rates_and_seeds_stay_in_the_file_and_do_not_count(tmp_path: Path) -> None:
    study: Study = parse_study(STUDY)
    rows = []
    for factor, seed in ((1.0, 0), (0.3, 0), (1.0, 7)):
        spec = study.job(Cell(optimizer="muon", treatment="sync", factor=factor, seed=seed))
        rows.append(row(spec, factor=factor, seed=seed))
    (tmp_path / RESULTS_NAME).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in rows))
    assert [*read_results(tmp_path / RESULTS_NAME, study).values()] == rows[:1]


def test_another_file_of_that_name_is_not_emptied(tmp_path: Path) -> None:
    """A line without an end is cut off if it may be a result alone."""
    path = tmp_path / RESULTS_NAME
    path.write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="is no file of results"), study_run._results_file(tmp_path):
        pass
    assert path.read_text() == '{"mine": 1}'
    path.write_text('{"optim')
    with study_run._results_file(tmp_path):
        assert path.read_text() == ""


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may have a byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_what_a_full_disk_does_not_take_is_told_as_that(tmp_path: Path) -> None:
    """Also at the end, when the rest of the file is written once more."""
    with pytest.raises(ConfigError, match=r"results\.jsonl: cannot be written"):  # noqa: SIM117 - one of the two raises
        with study_run._results_file(tmp_path) as results:
            results.write(b"{}\n")


def test_a_job_whose_first_batch_diverges_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> None:
        raise NonFiniteLossError(0, 0, float("nan"))

    monkeypatch.setattr(study_run, "train", train)
    assert study_run._timed(parse_job('job.name = "a"\n')) == 0
