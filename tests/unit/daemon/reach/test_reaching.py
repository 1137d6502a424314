"""A node dials ports, and dials them again."""

import asyncio
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.etcd.transaction import Put
from headway.daemon.reach import reach_dial
from headway.daemon.reach.reach_target import Target
from headway.daemon.reach.reaching import (
    AT_ONCE,
    DATED_EVERY_S,
    EVERY_S,
    FRESH_S,
    LINK_DOUBTED_S,
    LINK_STANDS_S,
    LONGEST_RETRY_S,
    MAX_PROVEN,
    REST_S,
    TO_ONE_NODE,
    ReachBook,
    Reaching,
    is_current,
    is_news,
    may_wait,
    ports_of,
    targets_of,
)
from headway.daemon.records.format import decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import Port, ReachFact, ReachRecord
from headway.daemon.records.records import Device, NodeRecord, PlanRecord, StagePlan, WorkerPort
from headway.daemon.telemetry import goodput
from headway.daemon.telemetry.probing import MAX_PEERS
from headway.daemon.telemetry.report_pace import CLUSTER_PER_S
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.worker.control import HEARTBEAT_EVERY_S

B = Target(node="b", incarnation="b-1", port=Port.DAEMON, address="b:7001")
WORKER = Target(node="b", incarnation="b-1", port=Port.WORKER, address="b:7100", device_index=0, worker="w-1")


def node(name: str, *, host: str = "", num_devices: int = 1) -> NodeRecord:
    return NodeRecord(
        name=name,
        incarnation=f"{name}-1",
        address=f"{name}:7001",
        host=host or name,
        site="here",
        devices=tuple(Device(kind="cpu", index=index) for index in range(num_devices)),
        memory_bytes=0,
        arithmetic_class="one",
        workers=tuple(
            WorkerPort(device_index=index, address=f"{name}:{7100 + index}", incarnation=f"{name}/w{index}")
            for index in range(num_devices)
        ),
    )


def record(*facts: ReachFact, num_peers: int = 0) -> ReachRecord:
    return ReachRecord(incarnation="a-1", facts=facts, num_peers=num_peers)


def view_of(*nodes: NodeRecord) -> ClusterView:
    view = ClusterView()
    view.nodes = {each.name: each for each in nodes}
    return view


def test_daemon_and_workers_of_every_peer_are_dialled_also_on_the_same_host() -> None:
    view = view_of(node("a"), node("b"), node("twin", host="a"))
    assert {(each.node, each.address) for each in targets_of(view, "a")} == {
        ("b", "b:7001"),
        ("b", "b:7100"),
        ("twin", "twin:7001"),
        ("twin", "twin:7100"),
    }
    assert targets_of(view, "stranger") == []


def test_workers_of_one_node_are_dialled_by_their_own_daemon() -> None:
    """They meet over the address that others dial: a host that does not take it back is found out."""
    assert [each.address for each in targets_of(view_of(node("a", num_devices=2)), "a")] == ["a:7100", "a:7101"]


def test_of_very_many_peers_a_limited_number_is_dialled() -> None:
    """All of a cluster that is not too large, and in a larger one those of the own plans and a few others."""
    view = view_of(*(node(f"n{index}") for index in range(MAX_PROVEN)))
    assert len({each.node for each in targets_of(view, "n0")}) == MAX_PROVEN - 1
    view = view_of(*(node(f"n{index}") for index in range(3 * MAX_PROVEN)))
    by_lot = {each.node for each in targets_of(view, "n0")}
    assert len(by_lot) == MAX_PEERS
    planned = [name for name in view.nodes if name not in by_lot][:40]
    stages = tuple(
        StagePlan(node=name, node_incarnation="", device_index=0, layers=(name,), depth=1) for name in ("n0", *planned)
    )
    plan = PlanRecord(generation=1, timeline=1, stages=stages)
    view.apply(Keys.of("demo", "plan"), encode(plan), mod_revision=1, create_revision=1)
    assert {each.node for each in targets_of(view, "n0")} >= set(planned) - {"n0"}
    assert len({each.node for each in targets_of(view, "n0")}) <= MAX_PROVEN


async def test_a_port_that_a_plan_found_silent_is_dialled_until_it_answers() -> None:
    """In a large cluster, where its node is no peer. It is dialled where it is by now; what has ended is forgotten."""
    view = view_of(*(node(f"n{index}") for index in range(3 * MAX_PROVEN)))
    view.num_record_changes += 1
    peers = {each.node for each in targets_of(view, "n0")}
    other = next(each for each in view.nodes.values() if each.name not in {"n0", *peers})
    dialled, answers = list[Target](), True

    async def dial(target: Target) -> str:
        if target.node == other.name:
            dialled.append(target)
            return "" if answers else "refused"
        return ""

    cluster: Any = SimpleNamespace(view=view)
    reaching = Reaching(node="n0", incarnation="n0-1", etcd=None, cluster=cluster, dial=dial, lease_id=lambda: 1)  # type: ignore[arg-type]
    daemon, worker = ports_of(other)

    async def round_at(now: float) -> list[Target]:
        """Return which of its ports a round dials."""
        dialled.clear()
        for proof in reaching._book._proofs.values():
            proof.due_at -= now
        async with asyncio.TaskGroup() as group:
            reaching._dial_what_is_due(group)
        return [*dialled]

    assert await round_at(0.0) == []
    answers = False
    assert await reaching.prove(worker) == "refused"
    assert await round_at(2 * LONGEST_RETRY_S) == [worker], "and not the daemon's port, which nobody found silent"
    moved = replace(other.workers[0], address="elsewhere:7100", incarnation="another")
    view.nodes[other.name] = replace(other, workers=(moved,))
    view.num_record_changes += 1
    answers = True
    assert [each.address for each in await round_at(2 * LONGEST_RETRY_S)] == ["elsewhere:7100"]
    assert await round_at(2 * LONGEST_RETRY_S) == [], "it answers"
    assert daemon not in dialled


def test_of_very_many_silent_ports_those_that_are_due_are_dialled() -> None:
    """A plan may have proven hundreds: peers wait for a dial as well."""
    book = ReachBook()
    targets = [replace(B, node=f"n{index:04d}") for index in range(2 * MAX_PROVEN)]
    for at, target in enumerate(reversed(targets)):
        book.found(target, "refused", now=10.0 * at, at=0.0)
    assert book.silent == {(target.node, target.port, target.device_index) for target in targets[MAX_PROVEN:]}


def test_a_port_is_dialled_at_first_sight_and_seldom_while_it_answers() -> None:
    book = ReachBook()
    assert book.due([B], now=0.0) == [B]
    book.found(B, "", now=0.0, at=1.0)
    assert book.due([B], now=EVERY_S / 2) == []
    assert book.due([B], now=2 * EVERY_S) == [B]


def test_an_outage_costs_little_more_than_it_lasts() -> None:
    """A silent port is dialled again with pauses of a tenth of its silence, from two seconds to a minute."""
    book, now = ReachBook(), 0.0
    while now < 3600.0:
        book.found(B, "refused", now=now, at=now)
        wait_s = book.due_at(B) - now
        assert 1.5 < wait_s < max(0.125 * now, 2.5)
        assert wait_s <= 1.2 * LONGEST_RETRY_S
        now += wait_s
    assert wait_s > 40.0
    book.found(B, "", now=now, at=now)
    book.found(B, "refused", now=now, at=now)
    assert book.due_at(B) - now < 3


def test_only_another_answer_is_told_in_the_log() -> None:
    book = ReachBook()
    answers = [book.found(B, reason, now=0.0, at=0.0) for reason in ("refused", "refused", "silent", "", "")]
    assert answers == [True, False, True, True, False]


def test_another_address_or_process_is_dialled_at_once() -> None:
    """The old fact stands until then: a blocked direction does not count as open because a worker died."""
    book = ReachBook()
    book.found(WORKER, "refused", now=0.0, at=0.0)
    successor = replace(WORKER, address="b:7101", worker="w-2")
    assert book.due([successor], now=0.0) == [successor]
    assert [fact.reason for fact in book.facts] == ["refused"]
    book.found(successor, "", now=0.0, at=0.0)
    assert [(fact.address, fact.reason) for fact in book.facts] == [("b:7101", "")]


def test_facts_about_a_lost_daemon_are_forgotten() -> None:
    book = ReachBook()
    book.found(B, "refused", now=0.0, at=0.0)
    book.forget([("b", "b-1")])
    assert book.facts
    book.forget([("b", "b-2")])
    assert not book.facts


def test_a_port_that_has_just_answered_is_not_dialled_for_a_plan() -> None:
    """Unless it is another process by now, or a link with its node was lost, or that was a while ago."""
    book = ReachBook()
    assert not book.has_just_answered(WORKER, now=0.0)
    book.found(WORKER, "", now=0.0, at=0.0)
    assert book.has_just_answered(WORKER, now=FRESH_S - 0.1)
    assert not book.has_just_answered(WORKER, now=FRESH_S)
    assert not book.has_just_answered(replace(WORKER, worker="w-2"), now=1.0)
    book.hurry("b", now=1.0)
    assert not book.has_just_answered(WORKER, now=1.0)
    book.found(WORKER, "", now=2.0, at=2.0)
    book.found(WORKER, "refused", now=3.0, at=3.0)
    assert not book.has_just_answered(WORKER, now=3.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"), [("", "", True), ("", "refused", False), ("refused", "", False)]
)
def test_only_facts_that_change_no_plan_are_written_later(before: str, after: str, expected: bool) -> None:
    fact = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:1", reason=before)
    assert may_wait(record(fact), record(replace(fact, reason=after, measured_at=7.0))) is expected
    assert may_wait(record(), record(replace(fact, reason=after))) is (not after)
    assert may_wait(record(num_peers=3), record(num_peers=4)), "only their number has changed"


async def test_one_dial_serves_all_who_want_to_know_at_the_same_time() -> None:
    """A spare's port is dialled at first sight, and for a plan; who gives up waiting ends it for nobody else."""
    dialled: list[Target] = []
    answers: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(target: Target) -> str:
        dialled.append(target)
        return await answers

    around: dict[str, Any] = {"etcd": None, "cluster": SimpleNamespace(view=ClusterView()), "lease_id": lambda: 1}
    reaching = Reaching(node="a", incarnation="a-1", dial=dial, **around)
    waiting = [asyncio.create_task(reaching.prove(WORKER)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    answers.set_result("")
    assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10.0) == ["", ""]
    assert dialled == [WORKER]
    assert await reaching.prove(WORKER) == ""
    assert dialled == [WORKER], "it has just answered"


def test_a_link_failure_outweighs_a_successful_dial() -> None:
    book = ReachBook()
    book.found(WORKER, "", now=0.0, at=0.0)
    book.link_failed(WORKER, "did not open", now=0.0, at=0.0)
    assert [fact.reason for fact in book.facts] == ["did not open"]
    assert book.due([WORKER], now=LINK_STANDS_S - 1) == []
    assert book.due([WORKER], now=LINK_STANDS_S + 1) == [WORKER]


def test_a_link_that_fails_again_is_doubted_longer() -> None:
    """A way on which dials succeed and links do not costs few attempts; later it is believed as at first."""
    book, now, stood = ReachBook(), 0.0, []
    for _ in range(6):
        book.link_failed(WORKER, "did not open", now=now, at=now)
        book.told(now=now)
        began = now
        while book.facts[0].reason:
            now = book.due_at(WORKER)
            book.found(WORKER, "", now=now, at=now)
        stood.append(now - began)
        now += 30.0  # the next link takes as long to fail
    assert stood == pytest.approx([5.0, 10.0, 20.0, 40.0, 60.0, 60.0])
    now += LINK_DOUBTED_S
    book.link_failed(WORKER, "did not open", now=now, at=now)
    assert book.due_at(WORKER) == now + LINK_STANDS_S


def test_many_reports_of_one_incident_count_once() -> None:
    """Each worker of this node, and each job, reports the port that all their links need."""
    book = ReachBook()
    for number in range(5):
        book.link_failed(WORKER, "did not open", now=0.01 * number, at=0.0)
    book.told(now=0.1)
    book.found(WORKER, "", now=0.1 + LINK_STANDS_S, at=0.0)
    assert not book.facts[0].reason


def test_silent_ports_do_not_hold_up_the_others() -> None:
    """They are due every two seconds, and come after those that have waited longer."""
    book = ReachBook()
    silent = [replace(WORKER, device_index=number) for number in range(8)]
    for target in silent:
        book.found(target, "no answer", now=0.0, at=0.0)
    answering = replace(WORKER, device_index=8)
    assert book.due([*silent, answering], now=4.0)[0] == answering
    book.found(silent[0], "no answer", now=4.0, at=0.0)
    assert book.due([*silent], now=10.0)[-1] == silent[0]


def test_after_a_lost_link_the_ports_of_that_node_are_dialled_at_once() -> None:
    book = ReachBook()
    book.found(B, "", now=0.0, at=0.0)
    book.found(WORKER, "refused", now=0.0, at=0.0)
    before = book.due_at(WORKER)
    book.hurry("b", now=1.0)
    assert book.due_at(B) == 1.0
    assert book.due_at(WORKER) == before


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"measured_at": DATED_EVERY_S / 2}, False),
        ({"measured_at": 2 * DATED_EVERY_S}, True),
        ({"reason": "refused"}, True),
        ({"address": "b:2"}, True),
    ],
)
def test_a_fresh_date_alone_is_seldom_written(changed: dict[str, object], expected: bool) -> None:
    fact = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:1", reason="silent")
    assert is_news(record(fact), record(replace(fact, **changed))) is expected  # type: ignore[arg-type]
    assert is_news(record(), record(fact))
    assert is_news(record(num_peers=1), record(num_peers=2))
    assert not is_news(record(num_peers=2), record(num_peers=1)), "everybody sees who has gone"


def test_a_record_names_the_ports_that_do_not_answer_and_counts_the_peers() -> None:
    """Every daemon receives every record, so ports that answer are not in it."""
    book = ReachBook()
    book.found(B, "", now=0.0, at=1.0)
    book.found(WORKER, "refused", now=0.0, at=1.0)
    book.found(replace(B, node="c"), "", now=0.0, at=1.0)
    book.found(replace(B, node="a", port=Port.WORKER, device_index=0), "", now=0.0, at=1.0)
    told = book.record("a", "a-1")
    assert [(fact.to, fact.port, fact.reason) for fact in told.facts] == [("b", Port.WORKER, "refused")]
    assert told.num_peers == 2, "the node itself is no peer"


async def test_in_a_large_cluster_news_that_change_no_plan_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 nodes each waits ten seconds with the number of its peers; a port that does not answer is told at once."""
    now, written = 100.0, list[ReachRecord]()
    monkeypatch.setattr("headway.daemon.reach.reaching.time", SimpleNamespace(monotonic=lambda: now))

    class Etcd:
        async def transaction(self, _: object, changes: list[Put]) -> int:
            written.append(decode(changes[0].value, ReachRecord))
            return 1

    async def caught_up(_: int, **__: float) -> bool:
        return True

    view = view_of(*(node(f"n{index}") for index in range(200)))
    cluster: Any = SimpleNamespace(view=view, is_reachable=True, caught_up=caught_up)
    etcd: Any = Etcd()
    around: dict[str, Any] = {"etcd": etcd, "cluster": cluster, "lease_id": lambda: 1, "dial": None}
    reaching = Reaching(node="n0", incarnation="n0-1", **around)
    reaching._book.found(replace(B, node="n1"), "", now=now, at=now)
    assert not await reaching._write()
    now += 200 / CLUSTER_PER_S - 0.1
    assert not await reaching._write()
    assert not written
    reaching._book.found(replace(B, node="n2"), "refused", now=now, at=now)
    assert await reaching._write()
    assert [(each.num_peers, len(each.facts)) for each in written] == [(2, 1)]


def test_a_process_that_ended_during_a_dial_is_not_unreachable() -> None:
    """A spare took the device, or the daemon moved or restarted: no fact follows."""
    b = node("b")
    worker = next(each for each in targets_of(view_of(node("a"), b), "a") if each.port is Port.WORKER)
    assert is_current(view_of(b), worker)
    spare = replace(b, workers=(WorkerPort(device_index=0, address="b:7105", incarnation="another"),))
    assert not is_current(view_of(spare), worker)
    assert is_current(view_of(replace(b, workers=())), worker), "a daemon of an earlier version names no ports"
    assert not is_current(view_of(replace(b, workers=(), down_devices=(0,))), worker)
    assert not is_current(view_of(replace(b, incarnation="b-2")), worker)
    assert not is_current(view_of(), worker)
    assert not is_current(view_of(replace(b, address="elsewhere:7001")), B)


def test_a_running_job_says_within_fifteen_seconds_which_way_is_blocked() -> None:
    """A standstill is seen and every attempt without an answer is over: 15 s less three for etcd and a busy machine."""
    seen_s = goodput.STANDS_AFTER_S + goodput.LOOK_EVERY_S + HEARTBEAT_EVERY_S
    pauses_s = sum(reach_dial.PAUSE_S * attempt for attempt in range(1, reach_dial.NUM_SILENT))
    assert seen_s + reach_dial.NUM_SILENT * reach_dial.CONNECT_S + pauses_s <= 12.0


def test_a_dial_from_before_a_link_failure_does_not_prove_the_link() -> None:
    """The worker's failure waits in its daemon until the pair is a fact in etcd, which may be away."""
    book = ReachBook()
    book.link_failed(WORKER, "nobody answers the hello", now=0.0, at=0.0)
    book.found(WORKER, "", now=900.0, at=900.0)
    assert [fact.reason for fact in book.facts] == ["nobody answers the hello"]
    assert book.due_at(WORKER) > 901.0, "a dial that proves nothing is not repeated at once"
    book.told(now=1000.0)
    book.found(WORKER, "", now=999.0 + LINK_STANDS_S, at=1.0)
    assert [fact.reason for fact in book.facts] == ["nobody answers the hello"]
    book.found(replace(WORKER, worker="w-2"), "", now=1001.0, at=2.0)
    assert [fact.reason for fact in book.facts] == [""], "another process listens there now"
    book.link_failed(WORKER, "nobody answers the hello", now=2000.0, at=3.0)
    book.told(now=2001.0)
    book.told(now=2004.0)
    book.found(WORKER, "", now=2001.0 + LINK_STANDS_S, at=70.0)
    assert [fact.reason for fact in book.facts] == [""]


async def test_in_a_large_cluster_a_port_that_does_not_answer_is_written_at_once() -> None:
    """The loop waits for a change when the finding comes, and rests for long between two rounds."""
    written = asyncio.Event()

    class Etcd:
        async def transaction(self, *_: object) -> int:
            written.set()
            return 1

    async def caught_up(_: int, **__: float) -> bool:
        return True

    view = view_of(*(node(f"n{index}") for index in range(5000)))
    watch = SimpleNamespace(
        view=view, version=1, is_reachable=True, changed=lambda _: asyncio.Event().wait(), caught_up=caught_up
    )

    async def answers(_: Target) -> str:
        return ""

    around: dict[str, Any] = {"etcd": Etcd(), "cluster": watch, "lease_id": lambda: 1}
    reaching = Reaching(node="none", incarnation="none-1", dial=answers, **around)
    running = asyncio.create_task(reaching.run())
    await asyncio.sleep(REST_S / 2)  # it waits
    reaching.link_failed(replace(B, node="n1", incarnation="n1-1"), "refused")
    await asyncio.wait_for(written.wait(), 5.0)
    running.cancel()
    await asyncio.wait({running})


async def test_a_dial_begins_when_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large cluster a round waits long for the next: it dials all that is due, a few at a time."""
    monkeypatch.setattr("headway.daemon.reach.reaching.REST_S", 3600.0)
    dialled, most, running_now = list[str](), 0, 0
    are_all = asyncio.Event()

    async def dial(target: Target) -> str:
        nonlocal most, running_now
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0)
        running_now -= 1
        dialled.append(target.node)
        if len(set(dialled)) == 30:
            are_all.set()
        return ""

    view = view_of(*(node(f"n{index}") for index in range(31)))
    watch = SimpleNamespace(view=view, version=1, is_reachable=False, changed=lambda _: asyncio.Event().wait())
    around: dict[str, Any] = {"etcd": None, "cluster": watch, "lease_id": lambda: 1}
    running = asyncio.create_task(Reaching(node="n0", incarnation="n0-1", dial=dial, **around).run())
    await asyncio.wait_for(are_all.wait(), 10.0)
    assert most == AT_ONCE
    running.cancel()
    await asyncio.wait({running})


async def test_a_hung_node_with_many_workers_holds_up_no_other() -> None:
    """None of its ports answers: two dials wait for it, and every other node is proven meanwhile."""
    hung, dialled = 0, set[str]()
    are_all = asyncio.Event()

    async def dial(target: Target) -> str:
        nonlocal hung
        if target.node == "n1":
            hung += 1
            await asyncio.Event().wait()
        dialled.add(target.node)
        if len(dialled) == 9:
            are_all.set()
        return ""

    workers = tuple(
        WorkerPort(device_index=index, address=f"n1:{index}", incarnation=f"w{index}") for index in range(8)
    )
    others = [node(f"n{index}") for index in range(2, 11)]
    view = view_of(node("n0"), replace(node("n1"), workers=workers), *others)
    watch = SimpleNamespace(view=view, version=1, is_reachable=False, changed=lambda _: asyncio.Event().wait())
    around: dict[str, Any] = {"etcd": None, "cluster": watch, "lease_id": lambda: 1}
    running = asyncio.create_task(Reaching(node="n0", incarnation="n0-1", dial=dial, **around).run())
    await asyncio.wait_for(are_all.wait(), 10.0)
    assert hung == TO_ONE_NODE
    running.cancel()
    await asyncio.wait({running})


async def test_dials_end_with_run() -> None:
    """`run` ends while a port is dialled for a plan that nobody waits for any more."""
    dialled, ended = asyncio.Event(), asyncio.Event()

    async def dial(target: Target) -> str:
        dialled.set()
        try:
            return await asyncio.Future[str]()
        finally:
            ended.set()

    watch = SimpleNamespace(view=ClusterView(), version=1, is_reachable=False, changed=lambda _: asyncio.Event().wait())
    around: dict[str, Any] = {"etcd": None, "cluster": watch, "lease_id": lambda: 1}
    reaching = Reaching(node="a", incarnation="a-1", dial=dial, **around)
    running = asyncio.create_task(reaching.run())
    proving = asyncio.create_task(reaching.prove(WORKER))
    await asyncio.wait_for(dialled.wait(), 10.0)
    proving.cancel()
    running.cancel()
    await asyncio.wait({running, proving})
    await asyncio.wait_for(ended.wait(), 10.0)


async def test_a_failed_dial_without_a_waiter_logs_no_error() -> None:
    """Python otherwise logs exceptions of tasks that nobody has awaited."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    is_asked, fails = asyncio.Event(), asyncio.Event()

    async def dial(target: Target) -> str:
        is_asked.set()
        await fails.wait()
        raise KeyError(target.node)

    around: dict[str, Any] = {"etcd": None, "cluster": SimpleNamespace(view=ClusterView()), "lease_id": lambda: 1}
    proving = asyncio.create_task(Reaching(node="a", incarnation="a-1", dial=dial, **around).prove(WORKER))
    await is_asked.wait()
    proving.cancel()
    await asyncio.wait({proving})
    del proving  # it would keep the error for as long as the test
    fails.set()
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert not complaints


async def test_a_dial_that_a_plan_waits_for_outlives_run() -> None:
    """`run` ends while a plan waits for a dial: the plan gets its answer, and nothing is dialled twice."""
    dialled: list[Target] = []
    begun = asyncio.Event()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(target: Target) -> str:
        dialled.append(target)
        begun.set()
        return await answer

    watch = SimpleNamespace(view=ClusterView(), version=1, is_reachable=False, changed=lambda _: asyncio.Event().wait())
    around: dict[str, Any] = {"etcd": None, "cluster": watch, "lease_id": lambda: 1}
    reaching = Reaching(node="a", incarnation="a-1", dial=dial, **around)
    running = asyncio.create_task(reaching.run())
    proving = [asyncio.create_task(reaching.prove(WORKER)) for _ in range(2)]
    await asyncio.wait_for(begun.wait(), 10.0)
    running.cancel()
    await asyncio.wait([running])
    answer.set_result("")
    assert await asyncio.wait_for(asyncio.gather(*proving), 10.0) == ["", ""]
    assert dialled == [WORKER]
