"""The leader retires jobs on a real etcd, and a person is told what became of them."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.job_requests import job_of, remove
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.measurements import ProgressRecord
from headway.daemon.cluster.records import CheckpointRecord, Desired, DesiredRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.cluster.transaction import Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.leader.sweeps import JobRetirement
from tests.rigs.running import running
from tests.rigs.simulated_cluster import small_spec


@asynccontextmanager
async def following(client: EtcdClient) -> AsyncIterator[ClusterWatch]:
    """A view that follows etcd."""
    cluster = ClusterWatch(client)
    async with running(cluster.run()):
        yield cluster


async def submitted(client: EtcdClient, name: str, phase: Phase, *, since: float) -> int:
    """Write a job with many records; return the revision."""
    spec = small_spec(name)
    changes = [
        Put(Keys.of(name, "spec"), encode(SpecRecord(spec=spec, uid="u"))),
        Put(Keys.of(name, "desired"), encode(DesiredRecord())),
        Put(Keys.of(name, "phase"), encode(PhaseRecord(phase=phase, generation=5, since=since))),
        Put(Keys.of(name, "progress"), encode(ProgressRecord(generation=5, batch=9, loss=2.5, tokens_per_second=1.0))),
        Put(Keys.of(name, "checkpoint"), encode(CheckpointRecord(timeline=1, boundary=10, url="/c/1-10"))),
    ]
    return await client.transaction([], changes)


def retirement(cluster: ClusterWatch, client: EtcdClient, **settings: Any) -> JobRetirement:
    is_leading = settings.pop("is_leading", True)
    return JobRetirement(client, cluster.view, is_leading=lambda: is_leading, **({"most": 1} | settings))


async def view_of(client: EtcdClient) -> ClusterView:
    """What etcd has now."""
    view = ClusterView()
    for entry in (await client.get_prefix(PREFIX)).entries:
        view.apply(entry.key, entry.value, mod_revision=entry.mod_revision, create_revision=entry.create_revision)
    return view


async def led(client: EtcdClient) -> None:
    await client.put(Keys.LEADER, encode(LeaderRecord(node="a", incarnation="a-1")))


async def test_the_older_of_two_ended_jobs_leaves_one_small_record(client: EtcdClient) -> None:
    """Its other records are gone, and status tells of it in one line; the running job and the younger one stay."""
    await led(client)
    await submitted(client, "old", Phase.FINISHED, since=time.time() - 1000)
    await submitted(client, "runs", Phase.RUNNING, since=time.time() - 2000)
    revision = await submitted(client, "young", Phase.FAILED, since=time.time())
    async with following(client) as cluster:
        assert await cluster.caught_up(revision, timeout_s=10.0)
        await retirement(cluster, client, is_leading=False).look()
        assert (await view_of(client)).jobs.keys() == {"old", "young", "runs"}, "only the leader retires"
        await retirement(cluster, client).look()
    found = await view_of(client)
    assert found.jobs.keys() == {"young", "runs"}
    assert not (await client.get_prefix(Keys.job("old"))).entries
    assert (found.retired["old"].generation, found.retired["old"].batch) == (5, 9)
    with pytest.raises(ConfigError, match=r"is retired: finished at .* after batch 9 .* stays at /c/1-10"):
        job_of(found, "old")


async def test_a_job_that_is_resumed_meanwhile_is_not_retired(client: EtcdClient) -> None:
    """The leader's view does not show the request yet: the transaction fails, and the job keeps its records."""
    await led(client)
    revision = await submitted(client, "j", Phase.FAILED, since=0.0)
    async with following(client) as cluster:
        assert await cluster.caught_up(revision, timeout_s=10.0)
        stale = SimpleNamespace(view=cluster.view)
    await client.put(Keys.of("j", "desired"), encode(DesiredRecord(state=Desired.RUNNING, request=1)))
    stale.view.set_in_sight(True, now=0.0)
    held: Any = stale
    await retirement(held, client, most=0).look()
    assert (await view_of(client)).jobs.keys() == {"j"}


async def test_a_job_that_is_resumed_while_another_is_retired_stays(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view shows the request and the leader's answer before the job's own turn comes."""
    await led(client)
    await submitted(client, "first", Phase.FINISHED, since=0.0)
    revision = await submitted(client, "second", Phase.FAILED, since=1.0)
    transaction = client.transaction
    async with following(client) as cluster:
        assert await cluster.caught_up(revision, timeout_s=10.0)

        async def slow(compare: Any, changes: Any) -> int:
            written = await transaction(compare, changes)
            monkeypatch.undo()
            await client.put(Keys.of("second", "desired"), encode(DesiredRecord(state=Desired.RUNNING, request=1)))
            resumed = PhaseRecord(phase=Phase.QUEUED, generation=5, request=1, since=time.time())
            assert await cluster.caught_up(
                await client.put(Keys.of("second", "phase"), encode(resumed)), timeout_s=10.0
            )
            return written

        monkeypatch.setattr(client, "transaction", slow)
        await retirement(cluster, client, most=0).look()
    assert (await view_of(client)).jobs.keys() == {"second"}


async def test_a_deposed_leader_retires_nothing(client: EtcdClient) -> None:
    await led(client)
    revision = await submitted(client, "j", Phase.FINISHED, since=0.0)
    async with following(client) as cluster:
        assert await cluster.caught_up(revision, timeout_s=10.0)
        stale = cluster
    await client.put(Keys.LEADER, encode(LeaderRecord(node="b", incarnation="b-1")))
    stale.view.set_in_sight(True, now=0.0)
    await retirement(stale, client, most=0).look()
    assert (await view_of(client)).jobs.keys() == {"j"}


async def test_a_removed_job_leaves_its_highest_generation(client: EtcdClient, tmp_path: Path) -> None:
    """So a later job of its name begins above it, although no node's record says it."""
    await submitted(client, "j", Phase.FINISHED, since=0.0)
    session: Any = SimpleNamespace(
        client=client, view=lambda: view_of(client), address=SimpleNamespace(state_dir=tmp_path)
    )
    assert (await remove(session, "j")).startswith("j: removed")
    found = await view_of(client)
    assert not found.jobs
    assert found.retired["j"].generation == 5
