"""A daemon's memory by name, job, address or file system is bounded: it runs for a year."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headway.daemon.agent.goodput import WorkerReports
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs import library
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.cluster.client import KeyValue, Snapshot
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import PlanRecord, SpecRecord, WorkerPart, WorkerRecord, WorkerState
from headway.daemon.decide.cluster_view import ABSENT_FOR_S, MAX_ABSENT, ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec
from headway.daemon.leader.sweeps import CheckpointSweep
from headway.daemon.worker.goal import Heartbeat
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from tests.rigs.agent_views import node_record
from tests.rigs.cluster_member import member

NODE = node_record("a")


def come_and_go(view: ClusterView, number: int, *, now: float) -> str:
    """A machine with a name of its own is there for a moment."""
    name = f"rented-{number}"
    record = replace(NODE, name=name, incarnation=f"{name}-1")
    view.apply(Keys.node(name), encode(record), mod_revision=2 * number + 1, create_revision=2 * number + 1, now=now)
    view.apply(Keys.node(name), None, mod_revision=2 * number + 2, create_revision=0, now=now)
    return name


def test_nodes_that_never_come_back_are_forgotten() -> None:
    """A new machine every ten minutes for three days, then a crowd in a second; who went lately is remembered."""
    view, now = ClusterView(), 0.0
    memories = (view.absent_since, view.arrived_at, view.arrived_in, view.departures, view._incarnations)
    for number in range(3 * 24 * 6):
        name, now = come_and_go(view, number, now=now), now + 600.0
        view.forget_absent(now=now)
    assert all(name in memory for memory in memories)
    assert {len(memory) for memory in memories} == {int(ABSENT_FOR_S / 600)}
    for number in range(20_000, 20_000 + 2 * MAX_ABSENT):
        name = come_and_go(view, number, now=now)
    view.forget_absent(now=now)
    assert {len(memory) for memory in memories} == {MAX_ABSENT}
    view.forget_absent(now=now + ABSENT_FOR_S + 1.0)
    assert {len(memory) for memory in memories} == {0}


def test_a_node_that_is_there_is_not_forgotten() -> None:
    """It has been there for a year, and went once before; a plan's node that is away keeps its patience."""
    view = ClusterView()
    view.apply(Keys.node("a"), encode(NODE), mod_revision=1, create_revision=1, now=0.0)
    view.apply(Keys.node("a"), None, mod_revision=2, create_revision=0, now=1.0)
    view.apply(Keys.node("a"), encode(NODE), mod_revision=3, create_revision=3, now=2.0)
    view.forget_absent(now=365 * 86400.0)
    assert (view.arrived_at, view.arrived_in, view.departures) == ({"a": 2.0}, {"a": 3}, {"a": (1.0,)})


def test_every_listing_of_etcd_forgets_nodes_that_are_gone() -> None:
    """Nothing else happens in this cluster: a day after the last node went, a listing takes its memory away."""
    now, key = 0.0, Keys.node("a")
    watch = ClusterWatch(cast(Any, SimpleNamespace(target="etcd")), clock=lambda: now)
    there = Snapshot(3, (KeyValue(key, encode(NODE), 3, 3, 1, 7),), cluster_id=1, raft_term=1)
    for listed in (there, replace(there, revision=4, entries=())):
        watch._take_listing(listed, watch._mark)
    assert watch.view.absent_since == {"a": 0.0}
    now = ABSENT_FOR_S + 1.0
    watch._take_listing(replace(there, revision=4, entries=()), watch._mark)
    assert watch.view.absent_since == {}


async def test_goodput_of_plans_that_are_over_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has a hundred plans, one after the other: only the present one's record is remembered."""
    stage = WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=("embed",), depth=1)
    job = JobView(name="j", submission=SpecRecord(spec=JobSpec(job=JobSection(name="j"))))
    view = ClusterView(jobs={"j": job})

    async def transaction(*_: object) -> int:
        return 1

    reports = WorkerReports(member(view=view, etcd=SimpleNamespace(transaction=transaction)))
    for generation in range(1, 101):
        job.plan = PlanRecord(generation=generation, timeline=1, workers=(stage,))
        worker = WorkerRecord(node="a", incarnation=f"w{generation}", address="", pid=1, state=WorkerState.RUNNING)
        job.workers = {(generation, 0): worker}
        beat = Heartbeat(job="j", generation=generation, seconds={"useful": float(generation)})
        reports.book.add(0, beat, now=float(generation))
        await reports._write_all()
        assert reports._reports._written.keys() == {Keys.goodput("j", generation, 0)}
    del view.jobs["j"]
    await reports._write_all()
    assert not reports._reports._written


async def test_file_systems_that_nobody_asks_are_forgotten() -> None:
    """Jobs name a hundred buckets; one of them hangs, and is remembered until it answers."""
    threads, gate = FileThreads("copies"), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(_: object) -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    for number in range(100):
        assert await threads.run(f"s3://bucket-{number}/x", lambda _: 7) == 7
    assert not threads._systems
    threads._silence_s = 0.01
    with pytest.raises(RecoveryError):
        await threads.run("s3://hangs/x", hang)
    assert threads._systems.keys() == {"s3://hangs"}
    gate.set()
    async with asyncio.timeout(20.0):
        while threads._systems:
            await asyncio.sleep(0.001)


async def test_only_the_last_data_sets_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three data sets and room for two: the first is not served to others until it is asked for again."""
    monkeypatch.setattr(library, "MAX_DATA_SETS", 2)
    books = DataLibrary(tmp_path / "cache", cast(Any, None), list)
    specs = []
    for number in range(3):
        folder = tmp_path / str(number)
        with writing_shards(folder, DataForm(vocab_size=256)) as writer:
            writer.append(np.full(500, number, dtype=np.uint8))
        specs.append(DataSpec(source=str(folder), sha256=TokenShards.open(folder).index.sha256))
        await books.open(specs[-1])
    assert [books.find(spec.sha256) is not None for spec in specs] == [False, True, True]
    assert [bool(books.state_of(spec.source)) for spec in specs] == [False, True, True]
    await books.open(specs[0])
    assert [books.find(spec.sha256) is not None for spec in specs] == [True, False, True]
    with pytest.raises(RecoveryError):
        await books.open(DataSpec(source="/nowhere", sha256="f" * 64))
    assert not books._fetching


async def test_a_sweep_forgets_troubles_of_removed_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder cannot be listed and its job is removed: a new job of the name is reported again."""
    spec = JobSpec(job=JobSection(name="j"), fault=FaultSpec(checkpoint_dir="checkpoints"))
    job = JobView(name="j", submission=SpecRecord(spec=spec, uid="u"))
    view = ClusterView(jobs={"j": job}, steady_since=0.0)
    sweep = CheckpointSweep(view, is_leading=lambda: True, checkpoint_root=tmp_path)

    def refused(url: str) -> None:
        raise RecoveryError(url, "no")

    monkeypatch.setattr("headway.daemon.leader.sweeps.list_boundaries", refused)
    await sweep.sweep()
    assert sweep._complaints.keys() == {"j"}
    del view.jobs["j"]
    await sweep.sweep()
    assert not sweep._complaints
