"""Gets the answer of `headway status` from etcd, or from a daemon while etcd is unreachable."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from headway.daemon.cli.options import say, say_json, with_cluster
from headway.daemon.errors import StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.daemon.addresses import NodeEndpoint
    from headway.daemon.client.cluster_access import ClusterSession
    from headway.daemon.reports.job_report import JobReport
    from headway.daemon.reports.watch_view import Snapshot
    from headway.daemon.view.cluster_view import ClusterView


def show_status(
    job: str, *, daemon: str, etcd: str | None, certs: Path | None, cluster: Path | None, as_json: bool
) -> None:
    """Print the state of a job, or one line for every job. daemon: ask this daemon instead of etcd."""
    from headway.daemon.client import cluster_access
    from headway.daemon.client.cluster_access import known

    if daemon:
        import os

        told = certs or (Path(os.environ["HEADWAY_CERTS"]) if os.environ.get("HEADWAY_CERTS") else None)
        if told is None:
            told = cluster_access.find_cluster(etcd=etcd, certs=certs, cluster=cluster).certificates
        address = cluster_access.ClusterAddress(etcd=(), certificates=told, daemons=(daemon,))
        _show_daemons(address, job, as_json=as_json, daemons=(daemon,))
        return

    async def work(session: "ClusterSession") -> None:
        from headway.daemon.client.job_requests import job_of
        from headway.daemon.reports.job_report import report_in, reports_in
        from headway.daemon.reports.watch_view import LossHistory, snapshot

        view = await session.view()
        if not job:
            _show_all(reports_in(view, view.jobs_in_order()), as_json=as_json)
            _say_set_aside(view, as_json=as_json)
            return
        found = job_of(view, job)
        if as_json:
            say_json(report_in(view, found))
            return
        shown = snapshot(view, job, LossHistory())
        assert shown is not None
        _draw(shown)
        _say_set_aside(view, job=job)

    try:
        with_cluster(etcd, certs, cluster, work)
    except StoreUnreachableError:
        address = cluster_access.find_cluster(etcd=etcd, certs=certs, cluster=cluster)
        daemons = address.daemons or known(address.etcd)
        if not daemons:
            raise
        _show_daemons(address, job, as_json=as_json, daemons=daemons)


def _show_daemons(address: object, job: str, *, as_json: bool, daemons: "Sequence[str | NodeEndpoint]") -> None:
    import asyncio

    from headway.daemon.client.cluster_access import ClusterAddress
    from headway.daemon.client.job_requests import ask_daemons
    from headway.daemon.reports.watch_view import Snapshot

    assert isinstance(address, ClusterAddress)
    told = asyncio.run(ask_daemons(daemons, address.identity()))
    reports = [told.report(job)] if job else [told.report(name) for name in told.jobs]
    if as_json:
        etcd = {"reachable": told.etcd_reachable, "away_s": told.etcd_away_s, "waits_for": told.waits_for}
        say_json({"asked": told.node, "etcd": etcd, "jobs": reports})
        return
    say(told.line)
    if job:
        _draw(Snapshot(report=reports[0]))
    else:
        _show_all(reports, as_json=False)


def _show_all(reports: "list[JobReport]", *, as_json: bool) -> None:
    from headway.daemon.reports.job_report import report_line

    if as_json:
        say_json(reports)
        return
    now = time.time()
    for line in [report_line(report, now=now) for report in reports] or [
        "no jobs; `headway submit JOB.toml` makes one"
    ]:
        say(line)


def _say_set_aside(view: "ClusterView", *, job: str = "", as_json: bool = False) -> None:
    from headway.daemon.reports.set_aside import set_aside_lines

    for line in [] if as_json else set_aside_lines(view, job=job):
        say(line)


def _draw(shown: "Snapshot") -> None:
    from headway.daemon.reports.watch_view import render
    from headway.daemon.terminal import console

    screen = console()
    screen.print(render(shown, width=min(screen.width, 120)))
    if shown.report.error:
        say(shown.report.error)
