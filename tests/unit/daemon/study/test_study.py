"""A study's file, the cells that it asks for, and its tables."""

import math
from dataclasses import asdict

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.study.study_file import Cell, Study, parse_study
from headway.daemon.study.study_plot import _draw_rates
from headway.daemon.study.study_results import best, edge_note, estimate, markdown, table, tried, wanted
from headway.daemon.study.study_run import Row

TEXT = """
job.name = "study"
job.seed = 5
[study]
seeds = 3
rates = [1, 3, 0.3]
[train]
batches = 40
[optimizer.adamw.optim]
matrices = { name = "adamw", lr = 1e-3 }
rest = { name = "adamw", lr = 2e-3 }
[optimizer.muon]
[treatment.sync.train]
schedule = "gpipe"
[treatment.delay.optim]
error_feedback = 0
[treatment."half EF".optim]
error_feedback = 0.5
"""
COSTS = {"sync": 0.0, "delay": 0.4, "half EF": 0.1}


def loss_of(cell: Cell, *, best_of: dict[str, float] | None = None) -> float:
    """A made-up loss: least at one factor of each treatment, and of each seed a little higher."""
    middle = (best_of or {}).get(cell.treatment, 1.0)
    return 2.0 + COSTS[cell.treatment] + abs(math.log(cell.factor / middle)) / 10 + cell.seed / 100


def completed(study: Study, **changes: dict[str, float]) -> tuple[dict[Cell, float], list[int]]:
    """Train, so to speak, until nothing is wanted; return the losses, and how many cells each round had."""
    losses: dict[Cell, float] = {}
    rounds = []
    while todo := wanted(study, losses):
        rounds.append(len(todo))
        losses |= {cell: loss_of(cell, **changes) for cell in todo}
    return losses, rounds


def test_cells_are_jobs_with_the_keys_of_both_tables() -> None:
    study = parse_study(TEXT)
    assert study.seeds == (5, 6, 7)
    assert study.rates == (0.3, 1.0, 3.0)
    spec = study.job(Cell(optimizer="adamw", treatment="half EF", factor=0.3, seed=6))
    assert (spec.job.seed, spec.train.schedule, spec.train.batches) == (6, "2bw", 40)
    assert (spec.optim.matrices.lr, spec.optim.rest.lr, spec.optim.error_feedback) == (3e-4, 6e-4, 0.5)
    assert study.job(Cell(optimizer="muon", treatment="sync", factor=1.0, seed=5)).train.schedule == "gpipe"


def test_an_optimizer_takes_no_setting_of_another_one() -> None:
    """A table with a name replaces the one of the job below it; one without is laid over it."""
    below = "optim.matrices = { name = 'muon', momentum = 0.9 }\n" + TEXT
    study = parse_study(below + "\n[optimizer.slow.optim.matrices]\nweight_decay = 0.5\n")
    assert study.jobs["slow", "sync"].optim.matrices.momentum == 0.9
    assert study.jobs["slow", "sync"].optim.matrices.weight_decay == 0.5
    assert study.jobs["adamw", "sync"].optim.matrices.name == "adamw"


def test_rates_are_chosen_with_the_first_seed_and_then_all_seeds_trained() -> None:
    """Two optimizers, three treatments, three rates; two more seeds at the best rate, which all share here."""
    study = parse_study(TEXT)
    losses, rounds = completed(study)
    assert rounds == [6, 12, 12]
    assert len(losses) == 30 <= study.most_cells


def test_a_treatment_is_compared_at_the_rate_of_the_first_one_and_at_its_own() -> None:
    study = parse_study(TEXT)
    best_of = {"delay": 0.3}
    losses, rounds = completed(study, best_of=best_of)
    assert rounds == [6, 12, 16]
    assert (best(study, losses, "muon"), best(study, losses, "muon", "delay")) == (1.0, 0.3)
    shared = next(line for line in table(study, losses) if line.treatment == "delay")
    own = next(line for line in table(study, losses, own_rates=True) if line.treatment == "delay")
    assert (shared.factor, own.factor) == (1.0, 0.3)
    assert shared.gap.mean == pytest.approx(0.4 + math.log(1 / 0.3) / 10)
    assert own.gap.mean == pytest.approx(0.4)


def test_rates_are_tried_from_the_middle_until_the_best_has_worse_neighbours() -> None:
    """Five rates: three where the middle is best, one more for each step to the side."""
    study = parse_study(TEXT.replace("rates = [1, 3, 0.3]", "rates = [0.1, 0.3, 1, 3, 10]"))
    losses, _ = completed(study, best_of={"sync": 1.0, "delay": 0.3, "half EF": 10.0})
    for treatment, tried_rates in (("sync", [0.3, 1, 3]), ("delay", [0.1, 0.3, 1, 3]), ("half EF", [0.3, 1, 3, 10])):
        assert [*tried(study, losses, "muon", treatment)] == tried_rates
    assert best(study, losses, "muon", "half EF") == 10


def test_gaps_and_shares_are_paired_by_seed() -> None:
    """Seeds that differ by more than the gap leave no interval, since each is compared with itself."""
    study = parse_study(TEXT)
    losses, _ = completed(study)
    sync, delay, half = table(study, losses)[:3]
    assert sync.recovered is None
    assert delay.recovered is None
    assert sync.gap.mean == 0
    assert half.recovered is not None
    assert half.recovered.mean == pytest.approx(0.75)
    assert half.recovered.half == pytest.approx(0, abs=1e-9)
    assert half.gap.excludes_0
    assert markdown([half])[-1].endswith("| 1 | 2.1600 | +0.1000 ± 0.0000 | 75% ± 0% |")


def test_an_interval_is_students() -> None:
    """scipy.stats.t.interval(0.9, 2, loc=2, scale=scipy.stats.sem([1, 2, 3]))[1] − 2"""
    assert estimate([1.0, 2.0, 3.0]).half == pytest.approx(1.6859, abs=1e-3)
    assert math.isnan(estimate([1.0]).half)
    assert not estimate([1.0, -0.5, 0.2]).excludes_0


def test_a_best_rate_at_the_edge_of_those_that_are_tried_is_told() -> None:
    """In the lines, and as one for people; among one rate there is no best."""
    study = parse_study(TEXT)
    losses, _ = completed(study, best_of={"delay": 0.3, "half EF": 3.0})
    own = table(study, losses, own_rates=True)
    assert [line.is_at_edge for line in own] == 2 * [False, True, True]
    [told] = edge_note(own)
    assert told.endswith("beyond: adamw, delay (× 0.3); adamw, half EF (× 3); muon, delay (× 0.3); muon, half EF (× 3)")
    alone = parse_study(TEXT.replace("rates = [1, 3, 0.3]", ""))
    assert edge_note(table(alone, completed(alone)[0])) == []


def test_the_picture_has_the_rates_that_were_tried_as_plain_numbers() -> None:
    """Under each optimizer, and no others: 3 and not 3 × 10⁰."""
    from matplotlib.figure import Figure

    study = parse_study(TEXT.replace("rates = [1, 3, 0.3]", "rates = [0.1, 0.3, 1, 3, 10]"))
    losses, _ = completed(study)
    rows = {
        cell: Row(**asdict(cell), job="", loss=loss, losses_sha256="", curve=(), seconds=1)
        for cell, loss in losses.items()
    }
    axes = Figure().subplots()
    _draw_rates(axes, study, rows, "muon")
    assert sorted(text.get_text() for text in axes.get_xticklabels(which="both")) == ["0.3", "1", "3"]


def test_a_diverged_training_is_never_the_best() -> None:
    study = parse_study(TEXT)
    losses, _ = completed(study)
    losses[Cell(optimizer="muon", treatment="sync", factor=1.0, seed=5)] = math.inf
    assert best(study, losses, "muon") != 1.0


def test_trainings_that_diverge_under_different_seeds_leave_no_gap() -> None:
    """An infinite loss less a finite one with one seed, and the other way round with the next: there is no mean."""
    study = parse_study(TEXT.replace("rates = [1, 3, 0.3]", ""))
    losses, _ = completed(study)
    losses[Cell(optimizer="muon", treatment="sync", factor=1.0, seed=6)] = math.inf
    losses[Cell(optimizer="muon", treatment="half EF", factor=1.0, seed=7)] = math.inf
    half = table(study, losses)[-1]
    assert math.isnan(half.gap.mean)
    assert half.recovered is None
    assert markdown([half])[-1] == "| muon | half EF | 1 | diverged |  |  |"


def test_no_share_of_a_gap_that_is_none() -> None:
    study = parse_study(TEXT.replace("rates = [1, 3, 0.3]", ""))
    losses = dict.fromkeys(completed(study)[0], 2.0)
    assert all(line.recovered is None for line in table(study, losses))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[optimizer.muon]", "[optimizer]\nmuon = 3"), "study:optimizer.muon: expected a table"),
        (("seeds = 3", "seeds = 0"), "study:study.seeds: must be from 1 to 100, is 0"),
        (("rates = [1, 3, 0.3]", "rates = [1, 1]"), "study:study.rates: expected factors above 0, each once"),
        (("rates = [1, 3, 0.3]", "rates = [1, 1.0000001]"), "study:study.rates: expected factors above 0, each once"),
        (("rates = [1, 3, 0.3]", "rates = [1, 1e6]"), "(adamw, sync, rates × 1e+06, seed 7):optim.rest.lr: must be"),
        (("rates = [1, 3, 0.3]", "rates = [5e-324]"), "optim.matrices.lr: must be above 0, is 0.0"),
        (("job.seed = 5", f"job.seed = {2**63 - 2}"), f"seed {2**63}):job.seed: must be at most"),
        (("error_feedback = 0.5", "error_feedback = 0.5\n[treatment.delay.job]\nseed = 3"), "is 3, and 5 elsewhere"),
        (('"half EF"', '"half\\nEF"'), "study:treatment: 'half\\nEF' is no name of at most 80 bytes"),
        (('"half EF"', '"half|EF"'), "study:treatment: 'half|EF' is no name"),
        (('"half EF"', f'"{"é" * 41}"'), "is no name of at most 80 bytes"),
        (('"half EF"', '"a b"]\n[treatment."a+b"'), "would have the same files; choose names that differ more"),
        (("rates = [1, 3, 0.3]", "rates = [-1]"), "study:study.rates: expected factors above 0"),
        (("seeds = 3", "seed = 3"), "study:study.seed: unknown key; did you mean `seeds`?"),
        (("error_feedback = 0.5", "error_feedbck = 0.5"), "did you mean `error_feedback`?"),
        (("batches = 40", "batches = 0"), "study (adamw, sync):train.batches: must be"),
        ((TEXT[TEXT.index("[treatment.sync") :], ""), "a study has at least one table [treatment.NAME]"),
    ],
)
def test_errors_name_the_place(change: tuple[str, str], says: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(ConfigError) as caught:
        parse_study(TEXT.replace(*change))
    assert says in str(caught.value)


def test_a_study_has_a_limit() -> None:
    many = "".join(f'[treatment.t{i}.job]\nname = "t"\n' for i in range(100))
    with pytest.raises(ConfigError, match="comes to 41,406 trainings; the maximum is 10,000"):
        parse_study(TEXT.replace("seeds = 3", "seeds = 100") + many)
    kinds = "".join(f"[treatment.t{i}]\n[optimizer.t{i}]\n" for i in range(4000))
    with pytest.raises(ConfigError, match="the maximum is 10,000"):  # before any of its jobs is read
        parse_study(TEXT + kinds)


def test_tables_that_are_nested_too_deeply_are_refused() -> None:
    """Dotted keys go deeper than TOML's own tables can."""
    deep = "1"
    for _ in range(20):
        deep = f"{{ {'.'.join('a' * 100)} = [\n{deep}\n] }}"
    with pytest.raises(ConfigError, match=r"study \(adamw, deep\): is nested too deeply"):
        parse_study(TEXT + f"[treatment.deep]\ntrain.x = {deep}\n")
