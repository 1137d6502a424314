"""Brings together what a job's picture needs: its records, its history, its pipeline, and what it is compared with."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of
from headway.daemon.client.job_trace import trace_job
from headway.daemon.client.job_watch import history_in
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.reports.metrics_file import METRICS_NAME, Gaps, HistoryRow, read_rows
from headway.daemon.reports.picture import OtherRun, Picture, picture_of, telling_rows
from headway.daemon.reports.pipeline_picture import MeasuredPipeline
from headway.stages.errors import PeerError

TRACE_TIMEOUT_S: Final = 5.0
"""The picture is drawn without the pipeline if nobody tells it so soon."""
NUM_BATCHES: Final = 4
"""Batches of the pipeline that are drawn."""

NUM_STRETCHES: Final = 10_000
"""Stretches of a long history of which the telling rows are kept while it is read."""

TracedPipeline = tuple[Sequence[str], MeasuredPipeline]
"""Names of the workers, and what they did."""


async def draw_job(
    session: ClusterSession,
    name: str,
    *,
    compare: str = "",
    rows: Sequence[HistoryRow] | None = None,
    pipeline: TracedPipeline | None = None,
) -> Picture:
    """Return the picture of a job, also of one that is over.

    compare: another job, a metrics file, or a folder with one. rows, pipeline: instead of asking for them. Raises
    ConfigError for an unknown job or an unreadable file, UnavailableError when no node answers.
    """
    view = await session.view()
    job = job_of(view, name)
    if job.spec is None:
        raise ConfigError("its submission cannot be read here, so there is nothing to draw", f"job {name}")
    why = ""
    if pipeline is None:
        pipeline, why = await traced(session, name)
    lost: list[str] = []
    if rows is None:
        rows = await _rows(session, view, name, lost, is_whole=bool(compare))
    return picture_of(
        job,
        view.nodes,
        rows,
        now_s=time.time(),
        pipeline=pipeline,
        why_no_pipeline=why,
        lost_rows="; ".join(lost),
        other=await _other(session, view, compare) if compare else None,
    )


async def traced(session: ClusterSession, name: str) -> tuple[TracedPipeline | None, str]:
    """Return a running job's last batches, or why there are none."""
    try:
        async with asyncio.timeout(TRACE_TIMEOUT_S):
            told, measured, _ = await trace_job(session, name, num_batches=NUM_BATCHES)
    except TimeoutError:
        return None, f"The workers did not tell their last batches within {TRACE_TIMEOUT_S:g} s."
    except ConfigError:
        return None, "No worker runs now: the last batches are drawn while a job runs."
    except (RecoveryError, PeerError) as error:
        return None, str(error)
    return ([worker.name for worker in told.workers], measured), ""


async def _rows(
    session: ClusterSession, view: ClusterView, name: str, lost: list[str], *, is_whole: bool
) -> list[HistoryRow]:
    """Return a job's history; of a long one the rows that a curve can show, unless all are to be compared.

    lost: gets a sentence for each gap.
    """
    spec = job_of(view, name).spec
    stretch = 1 if is_whole or spec is None else max(spec.train.batches // NUM_STRETCHES, 1)
    found: list[HistoryRow] = []
    held: list[HistoryRow] = []
    gaps = Gaps()
    async for row in history_in(session, view, name):
        lost += filter(None, [gaps.before(row)])
        held.append(row)
        if len(held) == stretch:
            found += telling_rows(held)
            held.clear()
    return found + telling_rows(held)


async def _other(session: ClusterSession, view: ClusterView, compare: str) -> OtherRun:
    path = Path(compare)
    path = path / METRICS_NAME if path.is_dir() else path
    if compare in view.jobs:
        return OtherRun(
            name=compare, rows=await _rows(session, view, compare, [], is_whole=True), spec=view.jobs[compare].spec
        )
    with suppress(OSError, ValueError):
        if path.exists():
            return OtherRun(name=compare, rows=read_rows(path))
    what = f"is no job of this cluster, no metrics file, and no folder with a {METRICS_NAME}"
    raise ConfigError(what, f"--compare {compare}")
