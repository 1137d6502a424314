"""Each wait of the coordinator has as long as its work takes, by what was predicted and measured."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe, ProbeRecord
from headway.daemon.cluster.records import PlanRecord, Save, StateFile, StateRecord, StopRecord
from headway.daemon.cluster.state_key import LEAST_BYTES_PER_S, SLOWEST_LINE_BYTES_PER_S
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.deadlines import START_DEADLINE_S, STOP_BATCHES, STOP_DEADLINE_S, Deadlines
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec
from tests.rigs.simulated_node import steady_view

SPEC = small_spec("first")
MOST_FACTOR = LEAST_BYTES_PER_S / SLOWEST_LINE_BYTES_PER_S


def deadlines(view: ClusterView) -> Deadlines:
    return Deadlines(view.jobs["first"], view, SPEC)


def put(view: ClusterView, key: str, record: object, *, now: float) -> None:
    revision = max(view.revisions.values(), default=0) + 1
    view.apply(key, encode(record), mod_revision=revision, create_revision=revision, now=now)


@pytest.fixture
def view() -> ClusterView:
    """Two nodes and a job that was submitted at 100."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.add_node("b")
    cluster.submit(SPEC)
    return cluster.truth()


def test_a_start_over_a_line_that_was_measured_to_be_slow_has_longer(view: ClusterView) -> None:
    """A tenth of the least that is expected without a measurement: ten times as long. A fast line changes
    nothing, and an absurd one has a limit.
    """
    usual_s = deadlines(view).transfer_seconds
    assert deadlines(view).start == pytest.approx(100.0 + START_DEADLINE_S + usual_s)
    for bytes_per_s, factor in ((1e9, 1.0), (LEAST_BYTES_PER_S / 10, 10.0), (1.0, MOST_FACTOR)):
        probe = LinkProbe(round_trip_s=0.01, bytes_per_s=bytes_per_s)
        put(view, Keys.probes("a"), ProbeRecord(incarnation="a-1", peers={"b": probe}), now=100.0)
        assert deadlines(view).transfer_seconds == pytest.approx(factor * usual_s)
        assert deadlines(view).start == pytest.approx(100.0 + START_DEADLINE_S + factor * usual_s)


def test_a_stop_follows_the_batches_and_each_file_that_is_saved(view: ClusterView) -> None:
    """A batch takes 50 s; the folder takes a file a minute: it is late when no file came for all that time."""
    plan = PlanRecord(generation=1, timeline=1, predicted_batch_seconds=50.0)
    put(view, Keys.of("first", "plan"), plan, now=100.0)
    put(view, Keys.of("first", "stop"), StopRecord(generation=1, save=Save.CHECKPOINT, boundary=4), now=200.0)
    within_s = STOP_DEADLINE_S + STOP_BATCHES * 50.0 + deadlines(view).transfer_seconds
    assert deadlines(view).stop == pytest.approx(200.0 + within_s)
    files = {f"block.{number}": StateFile(size_bytes=1, checksum="0") for number in range(3)}
    saved = {}
    for minute, name in enumerate(files, start=1):
        saved[name] = replace(files[name], is_durable=True)
        record = StateRecord(incarnation="a-1", generation=1, files=files | saved)
        put(view, Keys.state("first", 1, 4, "a"), record, now=200.0 + 60.0 * minute)
        assert deadlines(view).stop == pytest.approx(200.0 + 60.0 * minute + within_s)


def test_files_of_a_snapshot_before_the_stop_move_no_deadline(view: ClusterView) -> None:
    """They are no part of it."""
    put(view, Keys.of("first", "plan"), PlanRecord(generation=1, timeline=1), now=100.0)
    put(view, Keys.state("first", 1, 4, "a"), StateRecord(incarnation="a-1", generation=1), now=150.0)
    assert view.jobs["first"].state_changed_at == 0.0


def test_while_etcd_is_out_of_sight_no_wait_runs_out() -> None:
    """It came back at 500: every wait counts from then."""
    view = steady_view()
    view.set_in_sight(False, now=0.0)
    view.set_in_sight(True, now=500.0)
    put(view, Keys.of("first", "stop"), StopRecord(generation=1, save=Save.MOVES), now=200.0)
    assert deadlines(view).stop >= 500.0 + STOP_DEADLINE_S
    assert deadlines(view).prepare > 500.0
