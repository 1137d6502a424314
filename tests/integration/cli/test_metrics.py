"""The metrics of a daemon over HTTP, and the page that lists them."""

import asyncio
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.cluster_records import LeaderRecord, NodeFailureRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection
from headway.daemon.net.rate_limit import OutgoingTransfers, TransferKind
from headway.daemon.node.metrics import MOST_SCRAPES, Metric, Probe, card_metrics, serve_metrics
from headway.daemon.reports.metrics_file import rates
from tests.rigs.fake_cluster import SPEC, cluster_view
from tests.rigs.scrapes import PAGE, ROW, families, text_of


def page_with(told: dict[str, str]) -> str:
    """Return the page with these metrics in its table, in place of those that it has."""
    first, *_ = ROW.finditer(page := PAGE.read_text())
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in sorted(told.items()))
    return page[: first.start()] + rows + ROW.sub("", page[first.start() :])


def scrape(port: int) -> dict[str, float]:
    """Every sample of one scrape, by its name with labels."""
    lines = text_of(port).splitlines()
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
        Keys.LEADER: LeaderRecord(node="b", incarnation="b-1", quarantine_after=1),
        Keys.of("patient", "spec"): SpecRecord(spec=ended, submitted_at=3.0),
        Keys.of("patient", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("patient", "checkpoint"): CheckpointRecord(timeline=1, boundary=7, url="/nowhere", written_at=5.0),
    }
    for revision, (key, value) in enumerate(records.items()):
        view.apply(key, encode(value), mod_revision=1000 + revision, create_revision=1000)
    return view


async def test_a_leader_tells_of_its_node_and_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape of the leader's daemon has its worker's seconds by class and the job's progress; others' only theirs."""
    monkeypatch.setattr("headway.daemon.node.metrics.GATHER_EVERY_S", 0.0)
    reachable, outgoing = [True], OutgoingTransfers()
    outgoing.sent[TransferKind.COPY].num_bytes, outgoing.sent[TransferKind.COPY].held_s = 7, 1.5
    view, store = view_with_goodput(), StateStore(tmp_path, quota_bytes=0)
    found = {}
    for node in ("a", "b"):
        desk: Any = SimpleNamespace(
            node=node,
            view=view,
            store=store,
            logs_dir=tmp_path / "logs",
            etcd_away_s=lambda: None if reachable[0] else 1.0,
            certificate_ends=lambda: {"node": 9.0},
            outgoing=outgoing,
        )
        port, stop = serve_metrics("127.0.0.1", 0, desk, Activities())
        try:
            found[node] = await asyncio.to_thread(scrape, port)
            reachable[0] = False
            assert (await asyncio.to_thread(scrape, port))[f'headway_etcd_reachable{{node="{node}"}}'] == 0
            reachable[0] = True
            text = await asyncio.to_thread(text_of, port)
        finally:
            await asyncio.to_thread(stop)
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(scrape, port)
    leader, others = found["b"], found["a"]
    its = 'job="demo",node="b",stage="1",worker="1"'
    assert leader[f'headway_goodput_seconds_total{{class="useful",{its}}}'] == 80
    assert leader[f'headway_goodput_seconds_total{{class="waiting",{its}}}'] == 20
    assert leader[f"headway_link_resumes_total{{{its}}}"] == 2
    assert leader[f"headway_replayed_batches_total{{{its}}}"] == 4
    of_b = {name: leader[f'headway_{name}{{node="b"}}'] for name in ("leader", "node_failures", "store_bytes")}
    assert of_b == {"leader": 1, "node_failures": 1, "store_bytes": 0}
    assert leader['headway_transfer_bytes_total{kind="copy",node="b"}'] == 7
    assert leader['headway_transfer_held_seconds_total{kind="copy",node="b"}'] == 1.5
    assert leader['headway_transfer_seconds_total{kind="recovery",node="b"}'] == 0
    assert leader['headway_certificate_expiry_timestamp_seconds{certificate="node",node="b"}'] == 9
    assert leader['headway_disk_free_bytes{folder="store",node="b"}'] > 0
    assert leader['headway_job_batch{job="demo"}'] == 49
    assert leader['headway_job_loss{job="demo"}'] == 2.5
    assert leader['headway_job_learning_rate{job="demo"}'] == rates(SPEC)(49)
    assert leader['headway_job_tokens_per_second{job="demo"}'] == 4096
    assert leader['headway_job_batch_seconds{job="demo"}'] == SPEC.train.tokens_per_batch / 4096
    assert leader['headway_job_lag_batches{job="demo"}'] == 50
    assert leader['headway_job_phase{job="demo",phase="running"}'] == 1
    assert 'headway_job_restorable_boundary{job="demo"}' not in leader, "there is none"
    assert 'headway_job_stopped_early_at{job="demo"}' not in leader, "it is under way"
    assert leader['headway_job_stopped_early_at{job="patient"}'] == 7
    assert leader['headway_job_checkpoint_timestamp_seconds{job="patient"}'] == 5
    assert leader['headway_node_state{node="a",state="ready"}'] == 1
    assert leader['headway_node_state{node="b",state="quarantined"}'] == 1
    if os.environ.get("HEADWAY_WRITE"):
        PAGE.write_text(page_with(families(text)))
    assert PAGE.read_text() == page_with(families(text)), "HEADWAY_WRITE=1 writes the page's table again"
    assert others['headway_etcd_reachable{node="a"}'] == 1
    assert not [name for name in others if name.startswith(("headway_job", "headway_goodput_seconds_total{"))]


async def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Two daemons cannot listen at one port: the second says so."""
    desk: Any = SimpleNamespace(node="a", logs_dir=tmp_path / "logs", store=SimpleNamespace(directory=tmp_path))
    port, stop = serve_metrics("127.0.0.1", 0, desk, Activities())
    try:
        with pytest.raises(ConfigError, match=f"metrics_listen: cannot listen at 127.0.0.1:{port}"):
            serve_metrics("127.0.0.1", port, desk, Activities())
    finally:
        await asyncio.to_thread(stop)


def test_what_hangs_is_asked_once_and_costs_no_scrape() -> None:
    """A card's driver never answers: each scrape goes on without its figures, and no second thread waits for it."""
    asked, never = [], threading.Event()

    def ask() -> list[Metric]:
        asked.append(threading.current_thread())
        never.wait()
        return []

    nothing = list(card_metrics("a", ""))
    probe = Probe("a stuck card", ask, nothing=nothing)
    began = time.monotonic()
    assert all(probe.read() is nothing for _ in range(1000))
    assert time.monotonic() - began < 3, "the first one waits for a second"
    assert len(asked) == 1
    never.set()


async def test_who_keeps_connections_open_takes_no_more_threads_than_there_are_places(tmp_path: Path) -> None:
    """Strangers dial and say nothing: beyond the places their connections are closed at once."""
    desk: Any = SimpleNamespace(node="a", logs_dir=tmp_path / "logs", store=SimpleNamespace(directory=tmp_path))
    port, stop = serve_metrics("127.0.0.1", 0, desk, Activities())
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(MOST_SCRAPES)]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as late:
            assert await asyncio.to_thread(late.recv, 1) == b""
    finally:
        for each in silent:
            each.close()
        await asyncio.to_thread(stop)


def test_the_cards_of_a_machine_are_told_by_nvidia_smi() -> None:
    """Memory in bytes, use as a share; what a card does not tell is left out, and so is a table of something else."""
    table = "0, 1024, 81559, 37\n1, 2048, 81559, [N/A]\nNo devices were found\n"
    told = {sample.name: sample.value for family in card_metrics("a", table) for sample in family.samples}
    busy = [sample for family in card_metrics("a", table) for sample in family.samples if "busy" in sample.name]
    assert told["headway_card_memory_used_bytes"] == 2048 << 20
    assert [(sample.labels, sample.value) for sample in busy] == [({"node": "a", "card": "0"}, 0.37)]
