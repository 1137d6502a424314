"""Metrics as Prometheus gets them: over real HTTP."""

import asyncio
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSection
from headway.daemon.records.cluster_records import NodeFailureRecord
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import GoodputRecord
from headway.daemon.records.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.rpc.rate_limit import OutgoingTransfers, TransferKind
from headway.daemon.serving.metrics import MetricSource, serve_metrics
from headway.daemon.storage.state_store import StateStore
from headway.daemon.view.cluster_view import ClusterView
from tests.unit.daemon.cli.fake_cluster import SPEC, cluster_view


def scrape(port: int) -> dict[str, float]:
    """Every sample of one scrape, by its name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def view_with_goodput() -> ClusterView:
    """The fake cluster, whose leader is b, with what b's worker says, a failure of b and a job that ended early."""
    view = cluster_view()
    seconds = {"useful": 80.0, "waiting:stage 0 at a:1": 15.0, "waiting:the coordinator": 5.0}
    record = GoodputRecord(node="b", incarnation="w", seconds=seconds, num_replayed=4, num_resumed=2)
    ended = replace(SPEC, job=JobSection(name="patient"))
    records = {
        Keys.goodput("demo", 3, 1): record,
        Keys.goodput("demo", 3, 99): record,  # of no worker of the plan
        Keys.failure("b", 1): NodeFailureRecord(at=1.0, text="it died"),
        Keys.of("patient", "spec"): SpecRecord(spec=ended, submitted_at=3.0),
        Keys.of("patient", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("patient", "checkpoint"): CheckpointRecord(timeline=1, boundary=7, url="/nowhere"),
    }
    for revision, (key, value) in enumerate(records.items()):
        view.apply(key, encode(value), mod_revision=1000 + revision, create_revision=1000)
    return view


async def test_a_leader_tells_of_its_node_and_of_jobs(tmp_path: Path) -> None:
    """A scrape of the leader's daemon has its worker's seconds by class and the job's progress; others' only theirs."""
    reachable, outgoing = [True], OutgoingTransfers()
    outgoing.sent[TransferKind.COPY].num_bytes, outgoing.sent[TransferKind.COPY].held_s = 7, 1.5
    view, store = view_with_goodput(), StateStore(tmp_path / "store", quota_bytes=0)
    found = {}
    for node in ("a", "b"):
        source = MetricSource(
            node=node, view=view, store=store, is_etcd_reachable=lambda: reachable[0], outgoing=outgoing
        )
        port, stop = serve_metrics("127.0.0.1", 0, source)
        try:
            found[node] = await asyncio.to_thread(scrape, port)
            reachable[0] = False
            assert (await asyncio.to_thread(scrape, port))["headway_etcd_reachable"] == 0
            reachable[0] = True
        finally:
            await asyncio.to_thread(stop)
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(scrape, port)
    leader = found["b"]
    assert leader['headway_goodput_seconds_total{class="useful",job="demo",stage="1",worker="1"}'] == 80
    assert leader['headway_goodput_seconds_total{class="waiting",job="demo",stage="1",worker="1"}'] == 20
    assert leader['headway_link_resumes_total{job="demo",stage="1",worker="1"}'] == 2
    assert leader['headway_replayed_batches_total{job="demo",stage="1",worker="1"}'] == 4
    assert (leader["headway_leader"], leader["headway_node_failures"], leader["headway_store_bytes"]) == (1, 1, 0)
    assert leader['headway_transfer_bytes_total{kind="copy"}'] == 7
    assert leader['headway_transfer_held_seconds_total{kind="copy"}'] == 1.5
    assert leader['headway_transfer_seconds_total{kind="recovery"}'] == 0
    assert leader['headway_job_batch{job="demo"}'] == 49
    assert leader['headway_job_loss{job="demo"}'] == 2.5
    assert leader['headway_job_tokens_per_second{job="demo"}'] == 4096
    assert leader['headway_job_lag_batches{job="demo"}'] == 50
    assert leader['headway_job_phase{job="demo",phase="running"}'] == 1
    assert 'headway_job_restorable_boundary{job="demo"}' not in leader, "there is none"
    assert 'headway_job_stopped_early_at{job="demo"}' not in leader, "it is under way"
    assert leader['headway_job_stopped_early_at{job="patient"}'] == 7
    assert found["a"]["headway_etcd_reachable"] == 1
    assert not [name for name in found["a"] if name.startswith(("headway_job", "headway_goodput_seconds_total{"))]


async def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Two daemons cannot listen at one port: the second says so."""
    source = MetricSource(
        node="a",
        view=cluster_view(),
        store=StateStore(tmp_path / "store", quota_bytes=0),
        is_etcd_reachable=lambda: True,
    )
    port, stop = serve_metrics("127.0.0.1", 0, source)
    try:
        with pytest.raises(ConfigError, match=f"metrics_listen: cannot listen at 127.0.0.1:{port}"):
            serve_metrics("127.0.0.1", port, source)
    finally:
        await asyncio.to_thread(stop)
