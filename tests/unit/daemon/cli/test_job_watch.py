"""Waiting for a job, with a cluster that is a list of views."""

from collections.abc import AsyncGenerator
from typing import Any

from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import Desired, DesiredRecord, Phase, PhaseRecord
from headway.daemon.view.cluster_view import ClusterView
from tests.unit.daemon.cli.fake_cluster import cluster_view


class FollowedSession:
    """Shows one view after another."""

    def __init__(self, *views: ClusterView) -> None:
        self._views = views

    async def follow(self) -> AsyncGenerator[ClusterView, None]:
        """All views, and no more."""
        for view in self._views:
            yield view


def broken(phase: PhaseRecord, desired: DesiredRecord) -> ClusterView:
    """The cluster's failed job, a little later."""
    view = cluster_view()
    for leaf, record in (("phase", phase), ("desired", desired)):
        view.apply(Keys.of("broken", leaf), encode(record), mod_revision=1000, create_revision=1000)
    return view


async def test_watching_a_resumed_job_ignores_its_old_failure() -> None:
    """`resume` is written, and no leader has answered it yet."""
    failed, resumed = PhaseRecord(phase=Phase.FAILED, request=1), DesiredRecord(state=Desired.RUNNING, request=2)
    finished = PhaseRecord(phase=Phase.FINISHED, request=2)
    session: Any = FollowedSession(broken(failed, resumed), broken(finished, resumed))
    job = await wait_for_phase(session, "broken", frozenset({Phase.FINISHED}), timeout_s=5)
    assert job.phase.phase is Phase.FINISHED
    again = PhaseRecord(phase=Phase.FAILED, request=2)
    session = FollowedSession(broken(failed, resumed), broken(again, resumed))
    job = await wait_for_phase(session, "broken", frozenset({Phase.FINISHED}), timeout_s=5)
    assert job.phase == again
