"""Users and jobs that share a simulated cluster, one story at a time."""

from typing import Any

import pytest

from headway.daemon.cluster.cluster_records import SharesRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import EventRecord, Phase, PlanRecord
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.coordinator import decide
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

ENDLESS = 10**6
SLICE_S = SharesRecord().slice_s


def cluster_of(*names: str, slice_s: float = SLICE_S) -> SimulatedCluster:
    cluster = SimulatedCluster()
    for name in names:
        cluster.add_node(name)
    cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(slice_s=slice_s))})
    return cluster


def submit(
    cluster: SimulatedCluster, name: str, user: str = "alice", *, priority: int = 0, batches: int = ENDLESS, **rest: Any
) -> None:
    spec = small_spec(name, num_blocks=6, batches=batches, **rest)
    cluster.submit(spec.with_priority(priority), user=f"{user}@host")


def nodes_of(cluster: SimulatedCluster, job: str) -> set[str]:
    """Those of its plan in force."""
    raw = cluster.store.values.get(Keys.of(job, "plan"))
    return {stage.node for stage in decode(raw, PlanRecord).workers} if raw else set()


def is_running(cluster: SimulatedCluster, job: str) -> bool:
    return cluster.phase(job).phase is Phase.RUNNING


def trains(cluster: SimulatedCluster, *jobs: str) -> None:
    """Until all of them do, at full speed."""
    cluster.calm(until=lambda: all(is_running(cluster, job) for job in jobs))
    cluster.calm(max_rounds=6)


def for_seconds(cluster: SimulatedCluster, seconds: float, *, step_s: float = 2.0) -> None:
    cluster.calm(max_rounds=int(seconds / step_s), step_s=step_s)


def events(cluster: SimulatedCluster, job: str) -> list[str]:
    prefix = Keys.job(job) + "events/"
    found = sorted(key for key in cluster.store.values if key.startswith(prefix))
    return [decode(cluster.store.values[key], EventRecord).text for key in found]


@pytest.mark.parametrize("has_others", [False, True])
def test_backfill_delays_nobody_ahead(has_others: bool) -> None:
    """A big job waits for a short one: it starts at the same time, whether or not small ones come after it."""
    cluster = cluster_of("a", "b", "c")
    submit(cluster, "now", batches=60, max_nodes=1)
    trains(cluster, "now")
    submit(cluster, "big", min_nodes=3)
    began = cluster.now
    for number in range(12 if has_others else 0):
        submit(cluster, f"small-{number}", batches=10, max_nodes=1)
        for_seconds(cluster, 2.0)
    cluster.calm(until=lambda: cluster.phase("now").phase is Phase.FINISHED)
    freed = cluster.now
    cluster.calm(until=lambda: is_running(cluster, "big"))
    assert cluster.now - freed <= 5.0
    assert freed > began
    if has_others:
        assert cluster.phase("small-0").reason == "waits for devices of job big"
        assert cluster.phase("small-1").reason == "waits for its turn after job small-0"


def test_a_job_that_starts_slowly_keeps_its_devices_for_as_long_as_its_sentence_says() -> None:
    """Its start took longer than a time slice, so it would be a waste to stop it after one."""
    cluster = cluster_of("a", "b", slice_s=10.0)
    submit(cluster, "low", min_nodes=2)
    cluster.calm(until=lambda: cluster.phase("low").phase is Phase.PREPARING)
    cluster.deliver(cluster.nodes[cluster.leader])
    cluster.now += 40.0
    trains(cluster, "low")
    began = cluster.now
    submit(cluster, "high", priority=5, min_nodes=2)
    cluster.calm(max_rounds=4)
    told = cluster.phase("high").reason
    kept_s = float(
        told.removeprefix("waits for devices of job low: keeps its devices until it has run for ").split()[0]
    )
    assert kept_s >= 5 * 40.0
    while is_running(cluster, "low"):
        assert cluster.phase("high").reason == told
        for_seconds(cluster, 5.0)
    assert cluster.now - began == pytest.approx(kept_s, abs=15.0)


def test_a_small_job_of_another_user_is_served_after_a_slice() -> None:
    """One node, three jobs without end of alice: bob's small job has run within a slice and a little."""
    cluster = cluster_of("a")
    for number in range(3):
        submit(cluster, f"endless-{number}")
    for_seconds(cluster, 2 * SLICE_S, step_s=20.0)
    began = cluster.now
    submit(cluster, "small", "bob", batches=5)
    cluster.calm(until=lambda: cluster.phase("small").phase is Phase.FINISHED, step_s=5.0)
    assert cluster.now - began < SLICE_S + 60
    trains(cluster, "endless-0")


def test_waiting_and_sharing_cost_no_writes() -> None:
    """While nothing changes, two users' jobs run and a third waits: only what was used is written, once a minute."""
    cluster = cluster_of("a", "b")
    submit(cluster, "first", max_nodes=1)
    submit(cluster, "second", "bob", max_nodes=1)
    submit(cluster, "third", "bob", max_nodes=1)
    trains(cluster, "first", "second")
    for_seconds(cluster, 20)
    seen = len(cluster.store.history)
    for_seconds(cluster, 100)
    assert not any(change.key.startswith(Keys.job("third")) for change in cluster.store.history[seen:])
    assert sum(change.key == Keys.USAGE for change in cluster.store.history[seen:]) <= 2


def test_the_leader_wakes_when_a_time_slice_is_over() -> None:
    """No other event would wake it: the stop for a higher priority has its own deadline."""
    cluster = cluster_of("a", slice_s=90.0)  # no minute, after which use is written down
    submit(cluster, "low")
    trains(cluster, "low")
    submit(cluster, "high", "bob", priority=5)
    cluster.calm(max_rounds=4)
    view = cluster.truth()  # a new leader's: it gives the job its time slice from now on
    over = cluster.now + 90.0
    now = cluster.now
    while (wake_at := decide(view, now=now).wake_at) is not None and wake_at < over and now < wake_at:
        now = wake_at
        if (due_at := view.usage.due_at()) is not None and now >= due_at:
            view.usage.written_at = now
    assert wake_at == over
    [stop] = [command for command in decide(view, now=over).commands if command.job == "low"]
    assert isinstance(stop, Transaction)
    assert "Gives way" in stop.reason
