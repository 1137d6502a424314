"""Measurements wake nobody at once; what a plan waits for, and every end, does."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe, Port, ProbeRecord, ProgressRecord, ReachFact, ReachRecord
from headway.daemon.cluster.records import DesiredRecord
from headway.daemon.cluster.watch import KeyEvent, WatchBatch
from headway.daemon.decide.cluster_watch import PER_NODE_S, ClusterWatch, may_wait
from tests.rigs.blocked_ways import node

PATIENT = [
    Keys.node("a"),
    Keys.probes("a"),
    Keys.reach("a"),
    Keys.goodput("j", 1, 0),
    Keys.profile("j", "a", 0),
    Keys.of("j", "progress"),
    Keys.event("j", 1),
]
BOTH = (False, True)
URGENT = [
    *(Keys.of("j", leaf) for leaf in ("spec", "desired", "phase", "plan", "next", "stop", "checkpoint")),
    Keys.worker("j", 1, 0),
    Keys.state("j", 1, 10, "a"),
    Keys.reading("j", "a"),
    Keys.LEADER,
    Keys.PLACEMENT,
    Keys.failure("a", 1),
    Keys.revoked("a"),
    Keys.retired("j"),
    "/headway/jobs/",
    "/headway/anything",
]


@pytest.mark.parametrize("key", PATIENT)
def test_a_measurement_may_wait_but_not_its_end(key: str) -> None:
    of_nodes, measured = (Keys.NODES, Keys.PROBES, Keys.REACH), (Keys.PROBES, Keys.REACH)
    for leads in (True, False):
        assert may_wait(key, is_deleted=False, leads=leads)
    assert may_wait(key, is_deleted=True, leads=True) == key.startswith(measured), "a leader plans without the node"
    assert may_wait(key, is_deleted=True, leads=False) == key.startswith(of_nodes)


@pytest.mark.parametrize("key", URGENT)
def test_what_a_plan_waits_for_may_not(key: str) -> None:
    assert not any(may_wait(key, is_deleted=is_deleted, leads=leads) for is_deleted in BOTH for leads in BOTH)


async def test_many_measurements_are_one_change_and_a_wish_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large cluster. The view has each measurement at once, and `caught_up` knows it."""
    timers: list[float] = []
    loop = asyncio.get_running_loop()

    def call_later(after_s: float, wake: Any) -> _Timer:
        timers.append(after_s)
        return _Timer(wake)

    monkeypatch.setattr(loop, "call_later", call_later)
    client: Any = None
    cluster = ClusterWatch(client)
    cluster.view.nodes = {f"n{index}": node(f"n{index}") for index in range(1000)}
    progress = encode(ProgressRecord(generation=1, batch=1, loss=1.0, tokens_per_second=1.0))

    def seen(key: str, value: bytes, revision: int) -> None:
        event = KeyEvent(key=key, value=value, mod_revision=revision, create_revision=revision)
        cluster._take_batch(WatchBatch((event,)))

    before = cluster.version
    for revision in range(1, 21):
        seen(Keys.of("j", "progress"), progress, revision)
        assert cluster.revision == revision
    assert cluster.version == before
    assert timers == [pytest.approx(1000 * PER_NODE_S)], "one timer for all of them"
    seen(Keys.of("j", "desired"), encode(DesiredRecord()), 21)
    assert cluster.version == before + 1
    seen(Keys.of("j", "progress"), progress, 22)
    assert len(timers) == 2
    _Timer.newest()
    assert cluster.version == before + 2


async def test_a_measurement_wakes_the_leaders_daemon_alone() -> None:
    """And a change that others act on wakes them all: a node that comes, a way that is blocked, a plan's records."""
    client: Any = None
    cluster, revision = ClusterWatch(client), 0
    probes = encode(ProbeRecord(incarnation="a-1", peers={"b": LinkProbe(round_trip_s=0.1, bytes_per_s=1e9)}))
    progress = encode(ProgressRecord(generation=1, batch=1, loss=1.0, tokens_per_second=1.0))
    reaches = encode(ReachRecord(incarnation="a-1"))
    fact = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:1", reason="refused", measured_at=1.0)
    blocked = [replace(fact, measured_at=at) for at in (1.0, 700.0)]

    def wakes(key: str, value: bytes | None) -> bool:
        """Return whether it wakes a daemon of a cluster without nodes, where nothing waits for long."""
        nonlocal revision
        revision += 1
        before, waking = cluster.version, cluster._waking
        event = KeyEvent(key=key, value=value, mod_revision=revision, create_revision=1)
        cluster._take_batch(WatchBatch((event,)))
        return cluster.version > before or cluster._waking is not waking

    cluster.leads = lambda: False
    for name in "ab":
        assert wakes(Keys.node(name), encode(node(name)))
        cluster._bump()
    assert not wakes(Keys.probes("a"), probes)
    assert not wakes(Keys.reach("a"), reaches)
    assert wakes(Keys.reach("a"), encode(ReachRecord(incarnation="a-1", facts=(blocked[0],))))
    cluster._bump()
    assert not wakes(Keys.reach("a"), encode(ReachRecord(incarnation="a-1", facts=(blocked[1],)))), "a date alone"
    assert wakes(Keys.reach("a"), None)
    cluster._bump()
    assert wakes(Keys.of("j", "desired"), encode(DesiredRecord()))
    assert not wakes(Keys.of("j", "progress"), progress)
    assert not wakes(Keys.probes("a"), None)
    cluster.leads = lambda: True
    assert wakes(Keys.probes("a"), probes)
    cluster._bump()
    assert wakes(Keys.of("j", "progress"), progress)


class _Timer:
    """Fires when the test says so."""

    newest: Any = None

    def __init__(self, wake: Any) -> None:
        type(self).newest = staticmethod(wake)

    def cancel(self) -> None:
        type(self).newest = None
