"""A node dials ports for its plans, and dials those that do not answer again."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headway.daemon.agent import goodput
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.measurements import Port, ReachRecord
from headway.daemon.cluster.records import Device, NodeRecord, WorkerPort
from headway.daemon.cluster.transaction import Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net import reach_dial
from headway.daemon.net.reach_target import Target
from headway.daemon.net.reaching import (
    FRESH_S,
    LINK_DOUBTED_S,
    LINK_STANDS_S,
    LONGEST_RETRY_S,
    ReachBook,
    Reaching,
    is_current,
    ports_of,
)
from headway.daemon.worker.control import HEARTBEAT_EVERY_S
from tests.rigs.agent_views import node_record
from tests.rigs.cluster_member import member
from tests.rigs.running import running

B = Target(node="b", incarnation="b-1", port=Port.DAEMON, address="b:7001")
WORKER = Target(node="b", incarnation="b-1", port=Port.WORKER, address="b:7100", device_index=0, worker="b/w0")


def node(name: str) -> NodeRecord:
    worker = WorkerPort(device_index=0, address=f"{name}:7100", incarnation=f"{name}/w0")
    return node_record(name, address=f"{name}:7001", devices=(Device(kind="cpu"),), workers=(worker,))


def view_of(*nodes: NodeRecord) -> ClusterView:
    view = ClusterView()
    view.nodes = {each.name: each for each in nodes}
    return view


def reasons(book: ReachBook) -> list[str]:
    return [fact.reason for fact in book.record("a-1").facts]


class Place:
    """A node's reaching, with dials and an etcd that the test answers for."""

    def __init__(self, *nodes: NodeRecord) -> None:
        self.view = view_of(*(nodes or (node("b"),)))
        self.dialled = list[Target]()
        self.answer = ""
        self.written = list[ReachRecord]()
        self.has_written = asyncio.Event()
        cluster = SimpleNamespace(
            view=self.view,
            version=1,
            is_reachable=True,
            changed=lambda _: asyncio.Event().wait(),
            caught_up=self._caught_up,
        )
        self.reaching = Reaching(member(etcd=self, cluster=cluster), self.dial)

    async def dial(self, target: Target) -> str:
        self.dialled.append(target)
        return self.answer

    async def transaction(self, _: object, changes: list[Put]) -> int:
        self.written.append(decode(changes[0].value, ReachRecord))
        self.view.reach["a"] = self.written[-1]
        self.has_written.set()
        return 1

    async def _caught_up(self, _: int, **__: float) -> bool:
        return True


def test_an_outage_costs_little_more_than_it_lasts() -> None:
    """A silent port is dialled again with pauses of a tenth of its silence, from two seconds to a minute."""
    book, now = ReachBook(), 0.0
    assert book.due(now=now) == []
    while now < 3600.0:
        book.found(B, "refused", now=now, at=now)
        wait_s = book.next_due_at() - now
        assert 1.5 < wait_s < max(0.125 * now, 2.5)
        assert wait_s <= 1.2 * LONGEST_RETRY_S
        now += wait_s
        assert book.due(now=now) == [B]
    assert wait_s > 40.0
    book.found(B, "", now=now, at=now)
    assert book.due(now=2 * now) == []


def test_only_another_answer_is_told_in_the_log() -> None:
    book = ReachBook()
    answers = [book.found(B, reason, now=0.0, at=0.0) for reason in ("refused", "refused", "silent", "", "")]
    assert answers == [True, False, True, False, False]


def test_the_successor_of_a_worker_is_dialled_at_once() -> None:
    """The old fact stands until then: a blocked direction does not count as open because a worker died."""
    book, b = ReachBook(), node("b")
    book.found(WORKER, "refused", now=0.0, at=0.0)
    successor = replace(WORKER, address="b:7101", worker="w-2")
    book.look(view_of(replace(b, workers=(WorkerPort(device_index=0, address="b:7101", incarnation="w-2"),))))
    assert book.due(now=0.0) == [successor]
    assert reasons(book) == ["refused"]
    book.found(successor, "", now=0.0, at=0.0)
    assert reasons(book) == []


def test_facts_about_a_lost_daemon_are_forgotten() -> None:
    book = ReachBook()
    book.found(B, "refused", now=0.0, at=0.0)
    book.look(view_of(node("b")))
    assert reasons(book) == ["refused"]
    book.look(view_of(replace(node("b"), incarnation="b-2")))
    assert reasons(book) == []


def test_a_port_that_has_just_answered_is_not_dialled_for_a_plan() -> None:
    """Unless it is another process by now, or a link with its node was lost, or that was a while ago."""
    book = ReachBook()
    assert not book.has_just_answered(WORKER, now=0.0)
    book.found(WORKER, "", now=0.0, at=0.0)
    assert book.has_just_answered(WORKER, now=FRESH_S - 0.1)
    assert not book.has_just_answered(WORKER, now=FRESH_S)
    assert not book.has_just_answered(replace(WORKER, worker="w-2"), now=1.0)
    book.doubt(WORKER)
    assert not book.has_just_answered(WORKER, now=1.0)
    book.found(WORKER, "", now=2.0, at=2.0)
    book.found(WORKER, "refused", now=3.0, at=3.0)
    assert not book.has_just_answered(WORKER, now=3.0)


def test_a_link_that_fails_again_is_doubted_longer() -> None:
    """A way on which dials succeed and links do not costs few attempts; later it is believed as at first."""
    book, now, stood = ReachBook(), 0.0, []
    for _ in range(6):
        book.link_failed(WORKER, "did not open", now=now, at=now)
        book.link_failed(WORKER, "did not open", now=now, at=now)  # each worker and job reports the incident
        book.told(now=now)
        began = now
        while reasons(book):
            now = book.next_due_at()
            book.found(WORKER, "", now=now, at=now)
        stood.append(now - began)
        now += 30.0  # the next link takes as long to fail
    assert stood == pytest.approx([5.0, 10.0, 20.0, 40.0, 60.0, 60.0])
    now += LINK_DOUBTED_S
    book.link_failed(WORKER, "did not open", now=now, at=now)
    book.told(now=now)
    assert book.next_due_at() == now + LINK_STANDS_S


def test_a_dial_from_before_a_link_failure_does_not_prove_the_link() -> None:
    """The worker's failure waits in its daemon until the pair is a fact in etcd, which may be away."""
    book = ReachBook()
    book.link_failed(WORKER, "nobody answers the hello", now=0.0, at=0.0)
    book.found(WORKER, "", now=900.0, at=900.0)
    assert reasons(book) == ["nobody answers the hello"]
    assert book.due(now=901.0) == [], "a dial that proves nothing is not repeated at once"
    book.told(now=1000.0)
    book.told(now=1003.0)
    book.found(WORKER, "", now=999.0 + LINK_STANDS_S, at=1.0)
    assert reasons(book) == ["nobody answers the hello"]
    book.found(WORKER, "", now=1000.0 + LINK_STANDS_S, at=70.0)
    assert reasons(book) == []
    book.link_failed(WORKER, "nobody answers the hello", now=2000.0, at=3.0)
    book.found(replace(WORKER, worker="w-2"), "", now=2001.0, at=2.0)
    assert reasons(book) == [], "another process listens there now"


def test_a_process_that_ended_during_a_dial_is_not_unreachable() -> None:
    """A spare took the device, or the daemon moved or restarted: no fact follows."""
    b = node("b")
    daemon, worker = ports_of(b)
    assert (daemon, worker) == (B, WORKER)
    assert is_current(view_of(b), worker)
    spare = replace(b, workers=(WorkerPort(device_index=0, address="b:7105", incarnation="another"),))
    assert not is_current(view_of(spare), worker)
    assert is_current(view_of(replace(b, workers=())), worker), "its workers are not up yet"
    assert not is_current(view_of(replace(b, workers=(), down_devices=(0,))), worker)
    assert not is_current(view_of(replace(b, incarnation="b-2")), worker)
    assert not is_current(view_of(), worker)
    assert not is_current(view_of(replace(b, address="elsewhere:7001")), daemon)


def test_a_running_job_says_within_fifteen_seconds_which_way_is_blocked() -> None:
    """A standstill is seen and every attempt without an answer is over: 15 s less three for etcd and a busy machine."""
    seen_s = goodput.STANDS_AFTER_S + goodput.LOOK_EVERY_S + HEARTBEAT_EVERY_S
    pauses_s = sum(reach_dial.PAUSE_S * attempt for attempt in range(1, reach_dial.NUM_SILENT))
    assert seen_s + reach_dial.NUM_SILENT * reach_dial.CONNECT_S + pauses_s <= 12.0


async def test_one_dial_serves_all_who_want_to_know_at_the_same_time() -> None:
    """Two plans want a link; who gives up waiting ends it for nobody else."""
    place = Place()
    answers: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(target: Target) -> str:
        place.dialled.append(target)
        return await answers

    place.reaching._dial = dial
    waiting = [asyncio.create_task(place.reaching.prove(WORKER)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    answers.set_result("")
    assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10.0) == ["", ""]
    assert place.dialled == [WORKER]
    assert await place.reaching.prove(WORKER) == ""
    assert place.dialled == [WORKER], "it has just answered"


async def test_a_port_that_a_plan_found_silent_is_written_and_dialled_until_it_answers() -> None:
    place = Place()
    place.answer = "refused"
    async with running(place.reaching.run()):
        assert await place.reaching.prove(WORKER) == "refused"
        async with asyncio.timeout(10.0):
            await place.has_written.wait()
            place.has_written.clear()
            assert [(fact.to, fact.port, fact.reason) for fact in place.written[0].facts] == [
                ("b", Port.WORKER, "refused")
            ]
            place.answer = ""
            await place.has_written.wait()
        assert [record.facts for record in place.written[1:]] == [()]
        assert set(place.dialled) == {WORKER}, "and no other port"


async def test_after_a_lost_link_or_file_the_ports_of_that_node_are_dialled_at_once() -> None:
    place = Place(node("b"), node("c"))
    assert await place.reaching.prove(WORKER) == ""
    place.dialled.clear()
    place.answer = "refused"
    async with running(place.reaching.run()):
        await asyncio.sleep(0)
        place.reaching.doubt("b")
        place.reaching.doubt("nobody")
        await asyncio.wait_for(place.has_written.wait(), 10.0)
        assert {target.node for target in place.dialled} == {"b"}
        assert [fact.port for fact in place.written[-1].facts] == [Port.DAEMON, Port.WORKER]


async def test_a_dial_that_a_plan_waits_for_outlives_run_and_no_other() -> None:
    """`run` ends while two ports are dialled: the plan gets its answer, and the other dial ends."""
    place, ended = Place(), asyncio.Event()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(target: Target) -> str:
        place.dialled.append(target)
        try:
            return await answer if target == WORKER else await asyncio.Future[str]()
        finally:
            if target == B:
                ended.set()

    place.reaching._dial = dial
    running = asyncio.create_task(place.reaching.run())
    proving = asyncio.create_task(place.reaching.prove(WORKER))
    place.reaching.doubt("b")
    async with asyncio.timeout(10.0):
        while len(place.dialled) < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        await ended.wait()
        answer.set_result("")
        assert await proving == ""
