"""What `headway study` says in the end: the tables, and where everything is."""

import sys
from pathlib import Path
from typing import IO

import msgspec

from headway.daemon.reports.pipeline_picture import check_drawing
from headway.daemon.study.study_plot import draw_study
from headway.daemon.study.study_results import edge_note, markdown, table
from headway.daemon.study.study_run import JOBS_NAME, RESULTS_NAME, losses_of, open_study, run_study

PLOT_NAME = "study.png"


def answer(path: Path, out: Path, *, processes: int, progress: IO[str] | None, as_json: bool) -> list[str]:
    """Complete a study and return its tables. Raises ConfigError, DataError, JobFailedError."""
    check_drawing(str(path))
    study = open_study(path)
    rows = run_study(
        study, out, processes=processes, tell=lambda text: sys.stderr.write(f"{text}\n"), progress=progress
    )
    losses = losses_of(rows)
    tables = {
        f"rates with which {study.treatments[0]} ends lowest": table(study, losses),
        "rates with which each ends lowest": table(study, losses, own_rates=True),
    }
    draw_study(study, rows, out / PLOT_NAME)
    if as_json:
        return [msgspec.json.encode(tables).decode()]
    found: list[str] = []
    for title, lines in tables.items():
        if len(study.rates) > 1 or not found:
            found += [title, "", *markdown(lines), ""]
    of = f"{len(study.seeds)} seeds, paired, 90 % intervals" if len(study.seeds) > 1 else "one seed"
    found += [of, *edge_note(table(study, losses, own_rates=True))]
    return [*found, f"{out / PLOT_NAME}, {out / RESULTS_NAME}; {out / JOBS_NAME}: the job of each training"]
