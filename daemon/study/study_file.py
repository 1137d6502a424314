"""Reads a study: one job, and what varies of it. Pure.

Beside the sections of a job the file has `[study]`, and tables of keys that are laid over the job: one for each
optimizer and one for each treatment. Each cell of the study is a job like any other, and can be run in a cluster.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import OpenModel, job_of
from headway.daemon.jobs.rules import check_job
from headway.daemon.jobs.typed_toml import parse_toml, read_table, read_text

MOST_CELLS: Final = 10_000
"""Of one study; each is a whole training."""
MOST_SEEDS: Final = 100
MOST_RATES: Final = 4
"""Rates that are tried until the best one is found, as a rule: the middle, its neighbours, and one more."""
MAX_NAME_BYTES: Final = 80
"""Of an optimizer or a treatment: the name of a file has both."""
_UNUSUAL: Final = re.compile(r"[^\w.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """`[study]`."""

    seeds: int = 3
    """Trainings of each kept cell, with the job's seed and those that follow it."""
    rates: tuple[float, ...] = (1.0,)
    """Factors of every learning rate, among which the first seed looks for the best, from the middle outwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What the file has beside a job."""

    study: _Section = field(default_factory=_Section)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One training of a study."""

    optimizer: str
    treatment: str
    factor: float
    """Of every learning rate."""
    seed: int

    @property
    def told(self) -> str:
        """Return its name for people."""
        return f"{self.optimizer}, {self.treatment}, rates × {self.factor:g}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """Return the name of its job file."""
        return f"{_slug(self.optimizer, self.treatment)}-x{self.factor:g}-seed{self.seed}.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What varies, and the jobs."""

    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    optimizers: tuple[str, ...]
    treatments: tuple[str, ...]
    """What the first one ends at is what the others are compared with; the second one's loss is to be recovered."""
    jobs: Mapping[tuple[str, str], JobSpec]
    """By optimizer and treatment, with the rates of the file and the first seed."""

    def __contains__(self, cell: Cell) -> bool:
        is_asked = cell.factor in self.rates and cell.seed in self.seeds
        return is_asked and (cell.optimizer, cell.treatment) in self.jobs

    def job(self, cell: Cell) -> JobSpec:
        """Return the job of a cell."""
        spec = self.jobs[cell.optimizer, cell.treatment]
        matrices, rest = (
            replace(group, lr=_rounded(group.lr * cell.factor)) for group in (spec.optim.matrices, spec.optim.rest)
        )
        return replace(
            spec, job=replace(spec.job, seed=cell.seed), optim=replace(spec.optim, matrices=matrices, rest=rest)
        )

    @property
    def most_cells(self) -> int:
        """Return the cells that it comes to if each kind tries up to MOST_RATES rates, and keeps two of them."""
        kept = min(2, len(self.rates)) * (len(self.seeds) - 1)
        return len(self.optimizers) * len(self.treatments) * (min(MOST_RATES, len(self.rates)) + kept)


Resolve = Callable[[JobSpec, frozenset[str]], JobSpec]
"""Fixes what a job leaves to the machine; it gets the keys that the file names. Raises ConfigError."""


def read_study(path: Path, *, open_model: OpenModel | None = None, resolve: Resolve = lambda spec, _: spec) -> Study:
    """Return the study of a file. open_model: as for `parse_job`. Raises ConfigError, one line."""
    return parse_study(read_text(path, "study"), str(path), open_model=open_model, resolve=resolve)


def parse_study(
    text: str,
    source: str = "study",
    *,
    open_model: OpenModel | None = None,
    resolve: Resolve = lambda spec, _: spec,
) -> Study:
    """Return the study of TOML text. Raises ConfigError at `source:section.key`."""
    raw = parse_toml(text, source)
    section: _Section = read_table({"study": raw.pop("study", {})}, _File, source).study
    optimizers = _tables(raw.pop("optimizer", None), source, "optimizer", "adamw")
    treatments = _tables(raw.pop("treatment", None), source, "treatment", "sync")
    if not 1 <= section.seeds <= MOST_SEEDS:
        raise ConfigError(f"must be from 1 to {MOST_SEEDS}, is {section.seeds}", f"{source}:study.seeds")
    if (
        not section.rates
        or min(section.rates) <= 0
        or len({f"{rate:g}" for rate in section.rates}) < len(section.rates)
    ):
        raise ConfigError("expected factors above 0, each once, such as [0.3, 1, 3]", f"{source}:study.rates")
    study = Study(
        seeds=(0,) * section.seeds,
        rates=tuple(sorted(section.rates)),
        optimizers=tuple(optimizers),
        treatments=tuple(treatments),
        jobs={},
    )
    if study.most_cells > MOST_CELLS:
        raise ConfigError(f"comes to {study.most_cells:,} trainings; the maximum is {MOST_CELLS:,}", source)
    _check_names(optimizers, treatments, source)
    jobs: dict[tuple[str, str], JobSpec] = {}
    for name, of_optimizer in optimizers.items():
        for treatment, of_treatment in treatments.items():
            place, named = f"{source} ({name}, {treatment})", set[str]()
            try:
                laid = _laid(_laid(deepcopy(raw), of_optimizer), of_treatment)
            except RecursionError as error:
                raise ConfigError("is nested too deeply", place) from error
            job = job_of(laid, place, named=named, open_model=open_model)
            jobs[name, treatment] = resolve(job, frozenset(named))
            if job.job.seed != (first := next(iter(jobs.values())).job.seed):
                what = f"is {job.job.seed}, and {first} elsewhere: all kinds have the same seeds; set it in [job] alone"
                raise ConfigError(what, f"{place}:job.seed")
    study = replace(study, seeds=tuple(range(first, first + section.seeds)), jobs=jobs)
    for optimizer, treatment in jobs:
        for factor in {study.rates[0], study.rates[-1]}:
            last = Cell(optimizer=optimizer, treatment=treatment, factor=factor, seed=study.seeds[-1])
            check_job(study.job(last), f"{source} ({last.told})")
    return study


def _slug(*names: str) -> str:
    return _UNUSUAL.sub("-", "-".join(names))


def _check_names(optimizers: Iterable[str], treatments: Iterable[str], source: str) -> None:
    """Raise ConfigError for names that make no line of a table, and no file names of their own."""
    for key, names in (("optimizer", optimizers), ("treatment", treatments)):
        for name in names:
            if not name.strip() or not name.isprintable() or "|" in name or len(name.encode()) > MAX_NAME_BYTES:
                what = f"{name[:MAX_NAME_BYTES]!r} is no name of at most {MAX_NAME_BYTES} bytes that a table can show"
                raise ConfigError(what, f"{source}:{key}")
    taken: dict[str, tuple[str, str]] = {}
    for pair in product(optimizers, treatments):
        if (other := taken.setdefault(_slug(*pair), pair)) != pair:
            what = f"{', '.join(pair)} and {', '.join(other)} would have the same files; choose names that differ more"
            raise ConfigError(what, source)


def _tables(raw: object, source: str, key: str, example: str) -> dict[str, dict[str, Any]]:
    """Return the tables of keys below one name. Raises ConfigError when there are none, or other values."""
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(f"a study has at least one table [{key}.NAME], such as [{key}.{example}]", source)
    for name, table in raw.items():
        if not isinstance(table, dict):
            what = f"expected a table of a job's keys, such as [{key}.{example}.optim]"
            raise ConfigError(what, f"{source}:{key}.{name}")
    return raw


def _laid(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay keys over others, table by table. An optimizer of another name takes no setting from the one below it."""
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict) and "name" not in value:
            _laid(below[key], value)
        else:
            below[key] = deepcopy(value)
    return below


def _rounded(rate: float) -> float:
    """Return a rate as somebody would write it: a factor leaves no digits that say nothing."""
    return float(f"{rate:.6g}")
