"""The rate of measurements is limited for the whole cluster; what plans or people need soon is written soon."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent import goodput, probing
from headway.daemon.agent.goodput import WorkerReports
from headway.daemon.agent.node_reports import CLUSTER_PER_S, interval_s
from headway.daemon.agent.probing import INCOMPLETE_S, REWRITTEN_S, Probing
from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord, LinkProbe
from headway.daemon.cluster.records import PlanRecord, SpecRecord, WorkerPart, WorkerRecord, WorkerState
from headway.daemon.cluster.transaction import Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.worker.goal import Heartbeat
from tests.rigs.blocked_ways import node
from tests.rigs.cluster_member import member
from tests.rigs.simulated_cluster import small_spec

NUM_NODES = 400
NOBODY: Any = None
PAUSE_S = NUM_NODES / CLUSTER_PER_S


class Etcd:
    """Counts the records."""

    def __init__(self) -> None:
        self.num_records = 0

    async def transaction(self, _compare: Iterable[Any], changes: Iterable[Any]) -> int:
        self.num_records += sum(isinstance(change, Put) for change in changes)
        return 1


def large_view() -> ClusterView:
    """A job with one worker, in a large cluster."""
    view = ClusterView()
    view.nodes = {f"n{index}": node(f"n{index}") for index in range(NUM_NODES)}
    stage = WorkerPart(node="n0", node_incarnation="n0-1", device_index=0, layers=("embed",), depth=1)
    worker = WorkerRecord(node="n0", incarnation="w", address="", pid=1, state=WorkerState.RUNNING)
    records = {
        Keys.of("j", "spec"): SpecRecord(spec=small_spec("j")),
        Keys.of("j", "plan"): PlanRecord(generation=1, timeline=1, workers=(stage,)),
        Keys.worker("j", 1, 0): worker,
    }
    for number, (key, record) in enumerate(records.items(), start=1):
        view.apply(key, encode(record), mod_revision=number, create_revision=number)
    return view


def test_all_nodes_together_keep_the_rate() -> None:
    for num_nodes in (1, 99, 100, 101, 1000, 10_000):
        assert interval_s(5.0, num_nodes) >= 5.0
        assert num_nodes / interval_s(5.0, num_nodes) <= CLUSTER_PER_S
    assert interval_s(5.0, 10) == 5.0, "a small cluster reports as often as ever"


async def test_what_is_gone_with_a_lease_is_written_again() -> None:
    """Another lease, as after an outage: a worker that stands still is not told of in the next interval only."""
    etcd, lease = Etcd(), 1
    reports = WorkerReports(member("n0", view=large_view(), etcd=etcd, lease_id=lambda: lease))
    beat = Heartbeat(job="j", generation=1, operations=7, seconds={"useful": 1.0})
    reports.book.add(0, beat, now=0.0)
    await reports._write_all()
    await reports._write_all()
    assert etcd.num_records == 1
    lease = 2
    await reports._write_all()
    await reports._write_all()
    assert etcd.num_records == 2


def test_a_plan_has_its_own_seconds_alone_though_its_lease_took_the_record_of_the_plan_before() -> None:
    """The worker lives on, and its seconds go on: those of the first plan count once. A worker that begins anew has
    none of them.
    """
    view, book = large_view(), WorkerReports(member("n0")).book
    for generation, seconds in ((0, {"idle": 5.0}), (1, {"idle": 5.0, "useful": 95.0})):
        book.add(0, Heartbeat(job="j", generation=generation, seconds=seconds), now=0.0)
        assert [told.earlier for told in book.changes(view.jobs["j"], "n0").values()] == [{}] * generation
    plan = view.jobs["j"].plan
    assert plan is not None
    worker = view.jobs["j"].workers[1, 0]
    for key, record in ((Keys.of("j", "plan"), replace(plan, generation=2)), (Keys.worker("j", 2, 0), worker)):
        view.apply(key, encode(record), mod_revision=9, create_revision=9)
    for seconds, earlier in (({"idle": 7.0, "useful": 95.0}, {"idle": 5.0, "useful": 95.0}), ({"useful": 1.0}, {})):
        book.add(0, Heartbeat(job="j", generation=2, seconds=seconds), now=1.0)
        (told,) = book.changes(view.jobs["j"], "n0").values()
        assert (told.seconds, told.earlier) == (seconds, earlier)


async def test_seconds_alone_are_written_seldom_in_a_large_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still is news at once, and so is its end."""
    now, etcd = 1000.0, Etcd()
    monkeypatch.setattr(goodput, "time", SimpleNamespace(monotonic=lambda: now))
    reports = WorkerReports(member("n0", view=large_view(), etcd=etcd))

    async def look(*, waiting_for: str = "", num_replayed: int = 0) -> None:
        beat = Heartbeat(
            job="j",
            generation=1,
            operations=7,
            seconds={"useful": now},
            num_replayed=num_replayed,
            waiting_for=waiting_for,
            awaited_worker=0 if waiting_for else -1,
        )
        reports.book.add(0, beat, now=now)
        await reports._write_all()

    await look()
    assert etcd.num_records == 1
    for _ in range(3):
        now += PAUSE_S / 4
        await look()
    assert etcd.num_records == 1, "only seconds have passed"
    await look(waiting_for="stage 1")
    await look(waiting_for="stage 1")
    assert etcd.num_records == 2
    await look()
    assert etcd.num_records == 3
    await look(num_replayed=4)
    assert etcd.num_records == 4
    now += PAUSE_S
    await look(num_replayed=4)
    assert etcd.num_records == 5


def test_every_field_but_seconds_is_news() -> None:
    before = GoodputRecord(node="n0", incarnation="w", seconds={"useful": 1.0})
    assert not goodput.is_news(before, replace(before, seconds={"useful": 2.0}, recent={"useful": 1.0}, typical_s=0.1))
    told: list[dict[str, Any]] = [
        {"incarnation": "v"},
        {"num_replayed": 1},
        {"num_resumed": 1},
        {"trouble": "full"},
        {"waits_for": "b"},
        {"awaited_worker": 3},
    ]
    assert all(goodput.is_news(before, replace(before, **fields)) for fields in told)
    assert goodput.is_news(None, before)


async def test_news_of_several_peers_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are measured one by one: they are told when all are measured, or after a while."""
    now, etcd = 1000.0, Etcd()
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: now))
    found = Probing(member("n0", view=large_view(), etcd=etcd), NOBODY)
    for index in range(1, 9):
        found._found[probing.PeerWay(f"n{index}", f"n{index}-1", "")] = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)
        await found._write(is_complete=False)
        now += PAUSE_S / 10
    assert etcd.num_records == 0
    await found._write(is_complete=True)
    assert etcd.num_records == 1
    found._found[probing.PeerWay("n9", "n9-1", "")] = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)
    await found._write(is_complete=True)
    assert etcd.num_records == 1, "so many nodes may not write as often as a few"
    now += interval_s(PAUSE_S, NUM_NODES)
    await found._write(is_complete=True)
    assert etcd.num_records == 2
    now += interval_s(INCOMPLETE_S, NUM_NODES)
    found._found[probing.PeerWay("n10", "n10-1", "")] = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)
    await found._write(is_complete=False)
    assert etcd.num_records == 3, "some peers are silent for long"


async def test_in_a_small_cluster_the_first_way_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other peers may be silent: the planner has this one."""
    now, etcd, view = 1000.0, Etcd(), ClusterView()
    view.nodes = {name: node(name) for name in ("n0", "n1", "n2")}
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: now))
    found = Probing(member("n0", view=view, etcd=etcd), NOBODY)
    for index in range(2):
        found._found[probing.PeerWay("n1", "n1-1", "")] = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)
        await found._write(is_complete=False)
        assert etcd.num_records == index
        now += PAUSE_S / 2


async def test_ways_that_etcd_has_lost_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lease, or with a part of its history; and after a while in any case, because somebody may have deleted
    them. The view does not tell, where it leaves out the leader's records. A write that failed is none.
    """
    now, etcd, view, lease = 1000.0, Etcd(), ClusterView(), 1
    view.nodes = {name: node(name) for name in ("n0", "n1")}
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: now))
    found = Probing(member("n0", view=view, etcd=etcd, lease_id=lambda: lease), NOBODY)
    found._found[probing.PeerWay("n1", "n1-1", "")] = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)

    async def num_records() -> int:
        """Look several times."""
        nonlocal now
        for _ in range(3):
            now += INCOMPLETE_S
            await found._write(is_complete=True)
        return etcd.num_records

    async def away(_compare: Iterable[Any], _changes: Iterable[Any]) -> int:
        raise StoreUnreachableError("etcd", "is away")

    with monkeypatch.context() as patch:
        patch.setattr(etcd, "transaction", away)
        assert await num_records() == 0
    assert await num_records() == 1
    lease = 2
    assert await num_records() == 2
    view.start_anew(now=now)
    assert await num_records() == 3
    now += REWRITTEN_S
    assert await num_records() == 4
