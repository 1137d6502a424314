"""The fold of etcd's keys: any order, twice, late, unreadable."""

import random
from dataclasses import replace

import pytest

from headway.daemon.blobs.checkpoint_names import boundary_url
from headway.daemon.cluster.cluster_records import IssuedRecord, RevokedRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import DeviceShortage
from headway.daemon.cluster.records import (
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.decide.cluster_view import LONGEST_UNREST_S, SETTLE_S, ClusterView, Unrest
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

NODE = NodeRecord(
    name="a", incarnation="a-1", address="", host="", site="x", devices=(), memory_bytes=0, arithmetic_class=""
)
WORKER = WorkerRecord(node="a", incarnation="w", address="", pid=1, state=WorkerState.READY)


def put(view: ClusterView, key: str, record: object, revision: int, *, created: int = 0, now: float = 0.0) -> None:
    view.apply(key, encode(record), mod_revision=revision, create_revision=created or revision, now=now)


def delete(view: ClusterView, key: str, revision: int, *, now: float = 0.0) -> None:
    view.apply(key, None, mod_revision=revision, create_revision=0, now=now)


def test_job_without_phase_is_queued() -> None:
    """A spec alone: the phase that an absent key means, and the place in the queue of its creation."""
    view = ClusterView()
    put(view, Keys.of("j", "spec"), SpecRecord(spec=small_spec("j")), 7, created=5)
    [job] = view.jobs_in_order()
    assert (job.phase, job.spec_revision) == (PhaseRecord(phase=Phase.QUEUED), 5)


def test_every_record_of_a_job_finds_its_place() -> None:
    """Workers by (generation, stage), state by (timeline, boundary) and node."""
    view = ClusterView()
    plan = PlanRecord(
        generation=3,
        timeline=2,
        workers=(WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=("embed",), depth=1),),
    )
    put(view, Keys.of("j", "plan"), plan, 1)
    put(view, Keys.worker("j", 3, 0), WORKER, 2)
    put(view, Keys.worker("j", 2, 0), WORKER, 3)
    file = StateFile(size_bytes=1, checksum="x")
    state = StateRecord(incarnation="a-1", generation=3, files={"block.0": file})
    put(view, Keys.state("j", 2, 40, "a"), state, 4)
    job = view.jobs["j"]
    assert job.workers_of(plan) == {0: WORKER}
    assert job.state == {(2, 40): {"a": state}}
    assert job.holders(2, 40, "block.0") == {"a": file}
    assert job.holders(2, 40, "block.1") == {}
    delete(view, Keys.state("j", 2, 40, "a"), 5)
    assert view.jobs["j"].state == {}
    assert job.state == {(2, 40): {"a": state}}, "a view of a job is a value"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_delivery_ends_in_the_same_view(seed: int) -> None:
    """A cluster's whole history, shuffled and with repetitions: the same records as read in order."""
    cluster = SimulatedCluster(seed)
    cluster.add_node("a")
    cluster.add_node("b")
    cluster.submit(small_spec("first", batches=5))
    cluster.calm(max_rounds=30)
    cluster.drain("b")
    cluster.calm(max_rounds=10)
    in_order, shuffled = ClusterView(), ClusterView()
    history = cluster.store.history
    disorder = history + history[::3]
    random.Random(seed).shuffle(disorder)
    for view, changes in ((in_order, history), (shuffled, disorder)):
        for change in changes:
            view.apply(
                change.key, change.value, mod_revision=change.revision, create_revision=change.create_revision, now=1.0
            )
    assert shuffled.revisions == in_order.revisions
    assert (shuffled.nodes, shuffled.leader) == (in_order.nodes, in_order.leader)
    for name, job in in_order.jobs.items():
        other = shuffled.jobs[name]
        for field in (
            "submission",
            "spec_revision",
            "desired",
            "phase",
            "plan",
            "next",
            "stop",
            "workers",
            "state",
            "events",
        ):
            assert getattr(other, field) == getattr(job, field), field


def test_late_news_of_a_deleted_key_does_not_revive_it() -> None:
    """Put in revision 3, deleted in 5; the put arrives once more."""
    view = ClusterView()
    put(view, Keys.node("a"), NODE, 3)
    delete(view, Keys.node("a"), 5)
    put(view, Keys.node("a"), NODE, 3)
    assert view.nodes == {}
    assert view.revision_of(Keys.node("a")) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("/headway/what", b"{}"),
        ("/headway/nodes/a", b"not json"),
        ("/headway/nodes/a", b'{"name": 3}'),
        ("/headway/jobs/j/plan", b"[]"),
        ("/headway/jobs/j/what", b"{}"),
        ("/headway/jobs/j", b"{}"),
        ("/headway/jobs/j/workers/x/y", b"{}"),
        ("/headway/jobs/j/state/1/2", b"{}"),
    ],
)
def test_what_cannot_be_read_is_collected(key: str, value: bytes) -> None:
    """It is named with its reason, changes nothing else, and is forgotten when the key is gone or mended."""
    view = ClusterView()
    view.apply(key, value, mod_revision=1, create_revision=1)
    assert list(view.unreadable) == [key]
    assert (view.nodes, view.jobs) == ({}, {})


def test_ignored_key_that_is_mended_counts() -> None:
    """First rubbish, then a record."""
    view = ClusterView()
    view.apply(Keys.node("a"), b"rubbish", mod_revision=1, create_revision=1)
    put(view, Keys.node("a"), NODE, 2)
    assert (view.unreadable, list(view.nodes)) == ({}, ["a"])


def test_node_set_changes_only_with_what_plans_depend_on() -> None:
    """A node that notes a generation is no change; draining, going and coming are."""
    view = ClusterView()
    put(view, Keys.node("a"), NODE, 1, now=10.0)
    from dataclasses import replace

    put(view, Keys.node("a"), replace(NODE, generations={"j": 4}), 2, now=20.0)
    assert view.nodes_changed_at == 10.0
    put(view, Keys.node("a"), replace(NODE, is_draining=True), 3, now=30.0)
    assert view.nodes_changed_at == 30.0
    delete(view, Keys.node("a"), 4, now=40.0)
    assert (view.nodes_changed_at, view.absent_since) == (40.0, {"a": 40.0})


def test_phase_times_are_those_of_changes() -> None:
    """The same phase with another reason does not restart its deadline."""
    view = ClusterView()
    put(view, Keys.of("j", "phase"), PhaseRecord(phase=Phase.PREPARING), 1, now=1.0)
    put(view, Keys.of("j", "phase"), PhaseRecord(phase=Phase.PREPARING, reason="still"), 2, now=2.0)
    assert view.jobs["j"].entered_at == 1.0
    put(view, Keys.of("j", "phase"), PhaseRecord(phase=Phase.RUNNING), 3, now=3.0)
    assert view.jobs["j"].entered_at == 3.0


def test_a_phase_with_an_impossible_shortage_counts_without_it() -> None:
    """What memory taught only advises plans: the phase, and the possible shortage beside it, are read."""
    view = ClusterView()
    good = DeviceShortage(node="a", node_incarnation="a-1", device_index=0, room_bytes=9)
    bad = (replace(good, node="b", demand=0.5), replace(good, node="c", room_bytes=-1), replace(good, demand=-1.0))
    put(view, Keys.of("j", "spec"), SpecRecord(spec=small_spec("j")), 1)
    put(view, Keys.of("j", "phase"), PhaseRecord(phase=Phase.RUNNING, shortages=(*bad, good)), 2)
    [job] = view.jobs_in_order()
    assert job.phase == PhaseRecord(phase=Phase.RUNNING, shortages=(good,))
    assert not view.unreadable


def test_job_that_is_removed_is_gone() -> None:
    """All its keys are deleted, in any order: no trace."""
    view = ClusterView()
    keys = [Keys.of("j", "phase"), Keys.of("j", "spec"), Keys.of("j", "desired")]
    put(view, keys[0], PhaseRecord(), 1)
    put(view, keys[1], SpecRecord(spec=small_spec("j")), 1)
    for key in keys:
        delete(view, key, 2)
    assert view.jobs == {}


def test_names_of_checkpoint_folders() -> None:
    """By timeline and boundary, below the job's name, under a path or a URL."""
    assert boundary_url("s3://x/y/", "j", timeline=3, boundary=40) == "s3://x/y/j/00000003-0000000040"
    assert boundary_url("/c", "j", timeline=3, boundary=40, uid="u") == "/c/j/u/00000003-0000000040"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_revoked_node_is_not_there(is_first: bool) -> None:
    """Whichever record comes first; when it is restored, it is there with the record that it has then."""
    view = ClusterView()
    revoked = (Keys.revoked("A"), RevokedRecord(name="A", revoked_at=1.0), 2)
    node = (Keys.node("a"), NODE, 1)
    for key, record, revision in (revoked, node) if is_first else (node, revoked):
        put(view, key, record, revision)
    assert (view.nodes, view.is_revoked("a"), view.unreadable) == ({}, True, {})
    moved = replace(NODE, address="10.0.0.9:7070")
    put(view, Keys.node("a"), moved, 3, created=1)
    delete(view, Keys.revoked("a"), 4)
    assert (view.nodes, view.arrived_in) == ({"a": moved}, {"a": 1})
    put(view, Keys.revoked("A"), RevokedRecord(name="A", revoked_at=1.0), 5)
    delete(view, Keys.node("a"), 6)
    delete(view, Keys.revoked("a"), 7)
    assert view.nodes == {}


def test_certificates_are_known_by_small_letters() -> None:
    """A record under another name is set aside, and an invitation is nobody's business."""
    view = ClusterView()
    issued = IssuedRecord(name="Ann", role="reader", serial="A", issued_at=1.0, expires_at=2.0)
    put(view, Keys.issued("Ann"), issued, 1)
    put(view, Keys.invitation("Ben"), issued, 2)
    put(view, Keys.revoked("b"), RevokedRecord(name="c", revoked_at=1.0), 3)
    put(view, f"{Keys.REVOKED}B", RevokedRecord(name="B", revoked_at=1.0), 4)
    assert (view.issued, view.revoked) == ({"ann": issued}, {})
    assert view.unreadable.keys() == {Keys.revoked("b"), f"{Keys.REVOKED}B"}


def test_a_group_of_nodes_is_waited_for() -> None:
    """Three nodes within 3 s: all count from when the last of them has settled."""
    unrest = Unrest()
    for number, at in enumerate((100.0, 101.5, 103.0)):
        unrest.changed(f"n{number}", now=at)
    assert unrest.settled_at == 103.0 + SETTLE_S


def test_an_endless_row_of_newcomers_is_not_waited_for() -> None:
    """A node every second: after a while a job may start, on those that have settled."""
    unrest = Unrest()
    for number in range(60):
        unrest.changed(f"n{number}", now=100.0 + number)
    assert unrest.settled_at == 100.0 + LONGEST_UNREST_S
    assert unrest.unsettled([f"n{number}" for number in range(60)], now=159.0) == {"n58", "n59"}
    assert len(unrest.changed_at) <= 3, "the memory of changes is short"


def test_a_node_that_changes_again_stays_unsettled() -> None:
    """The changes before its last one are forgotten, and those of others are not forgotten with it."""
    unrest = Unrest()
    for name, at in (("one", 100.0), ("two", 100.5), ("one", 101.5), ("three", 102.2)):
        unrest.changed(name, now=at)
    assert unrest.changed_at == {"two": 100.5, "one": 101.5, "three": 102.2}
    assert unrest.unsettled(["one", "two", "three"], now=102.6) == {"one", "three"}
    unrest.changed("four", now=103.0)
    assert unrest.changed_at == {"one": 101.5, "three": 102.2, "four": 103.0}
