"""Candidates for leader: one leads, and decides only as long as it does."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import NoAccessError, RecoveryError
from headway.daemon.blobs.file_threads import Beat
from headway.daemon.cluster.client import EtcdClient, Snapshot
from headway.daemon.cluster.cluster_records import LeaderRecord, NodeFailureRecord, RevokedRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProbeRecord
from headway.daemon.cluster.records import DesiredRecord, NodeRecord
from headway.daemon.cluster.transaction import Change, Compare
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.commands import Command, Decision, Transaction, WriteManifest
from headway.daemon.leader import leadership
from headway.daemon.leader.leadership import Leadership
from tests.integration.conftest import Etcd
from tests.rigs.leadership import DEADLINE_S, Candidate, Folders, candidate, no_manifest


async def until_leader_is(client: EtcdClient, name: str | None) -> None:
    """Return when the leader key names a node; None: when it is absent."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            entry = await client.get(Keys.LEADER)
            if (decode(entry.value, LeaderRecord).node if entry else None) == name:
                return
            await asyncio.sleep(0.02)


async def test_the_first_candidate_leads_and_the_second_follows_when_it_resigns(etcd: Etcd, client: EtcdClient) -> None:
    """Two candidates: one leads, and when it resigns the other leads well before the lease could have expired."""
    async with candidate(etcd, "one") as one:
        await one.until_leading()
        async with candidate(etcd, "two") as two:
            async with asyncio.timeout(DEADLINE_S):
                while two.cluster.view.leader is None:
                    await two.cluster.changed(two.cluster.version)
            assert not two.leadership.is_leading
            await one.stop()
            await until_leader_is(client, "two")
            assert not one.leadership.is_leading
    await until_leader_is(client, None)


@pytest.mark.parametrize("listing_s", [0.0, 1.0], ids=["at once", "over a thin line"])
async def test_a_new_leader_knows_what_was_measured_before_it_decides(
    listing_s: float, etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways between nodes, of which its daemon hears nothing while another one leads. Over a thin line their listing
    takes longer than any deadline of the leader: plans without them would blame good nodes.
    """
    decided: list[set[str]] = []

    def decide(view: ClusterView, *, now: float) -> Decision:
        decided.append({*view.probes})
        return Decision()

    monkeypatch.setattr(leadership, "CATCH_UP_S", 0.1)
    async with etcd.client() as own:
        list_all = own.get_prefix

        async def slowly(prefix: str, **options: Any) -> Snapshot:
            await asyncio.sleep(listing_s if prefix == Keys.FOR_LEADER else 0.0)
            return await list_all(prefix, **options)

        monkeypatch.setattr(own, "get_prefix", slowly)
        await client.put(Keys.LEADER, encode(LeaderRecord(node="zero", incarnation="1")))
        one = Candidate(own, "one", decide=decide, write_manifest=no_manifest, leads_at_first=False)
        await client.put(Keys.probes("a"), encode(ProbeRecord(incarnation="a-1", peers={})))
        heard = await client.put(Keys.of("j", "desired"), encode(DesiredRecord()))
        try:
            assert await one.cluster.caught_up(heard, timeout_s=DEADLINE_S)
            assert one.cluster.view.probes == {}
            await client.delete(Keys.LEADER)
            async with asyncio.timeout(DEADLINE_S):
                while not decided:
                    await asyncio.sleep(0.01)
        finally:
            await one.stop()
    assert decided[0] == {"a"}


async def test_another_takes_over_from_a_leader_that_was_killed(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> None:
    """The leader is a process and gets SIGKILL: its key expires with the lease, and the other candidate leads."""
    program = Path(__file__).with_name("leader_process.py")
    identity = etcd.authority.issue("victim")
    victim = subprocess.Popen([sys.executable, str(program), etcd.endpoint, str(identity)])
    try:
        await until_leader_is(client, "victim")
        async with candidate(etcd, "heir") as heir:
            victim.send_signal(signal.SIGKILL)
            await heir.until_leading()
            await until_leader_is(client, "heir")
    finally:
        victim.kill()
        victim.wait(timeout=10)


def order(key: str, value: bytes) -> Transaction:
    """Create a key that is still absent."""
    return Transaction(job="j", reason="test", compare={key: 0}, puts={key: value})


async def test_a_leader_without_access_to_checkpoints_leaves_the_manifest_to_another(
    etcd: Etcd, client: EtcdClient
) -> None:
    """It has no credentials for the folder: it resigns, the other node leads and writes, and the job goes on."""
    key = Keys.of("j", "desired")
    written: list[str] = []

    def decide(view: ClusterView, *, now: float) -> Decision:
        if view.revision_of(key):
            return Decision()
        then = order(key, encode(DesiredRecord()))
        return Decision(commands=(WriteManifest(job="j", url="moody://b/u", manifest=b"{}", then=then),))

    def refuse(url: str, manifest: bytes, beat: Beat) -> None:
        raise NoAccessError(url, "this node has no credentials for it")

    async def register(name: str) -> None:
        record = NodeRecord(
            name=name, incarnation="1", address="", host="", site="", devices=(), memory_bytes=0, arithmetic_class=""
        )
        await client.put(Keys.node(name), encode(record))

    await register("poor")
    async with candidate(etcd, "poor", decide=decide, write_manifest=refuse) as poor:
        await poor.until_leading()
        async with candidate(etcd, "rich", decide=decide, write_manifest=lambda url, *_: written.append(url)) as rich:
            async with asyncio.timeout(DEADLINE_S):
                while rich.cluster.view.leader is None:
                    await rich.cluster.changed(rich.cluster.version)
            await register("rich")  # not before it stands: a leader gives way for a few seconds only
            await until_leader_is(client, "rich")
            async with asyncio.timeout(DEADLINE_S):
                while not rich.cluster.view.revision_of(key):
                    await rich.cluster.changed(rich.cluster.version)
    assert written == ["moody://b/u"]


async def test_the_leader_writes_what_was_decided_once(etcd: Etcd, client: EtcdClient) -> None:
    """The coordinator wants a key that is absent: it is written, seen, and not written again."""
    key = Keys.of("j", "desired")
    decided: list[Command] = []

    def decide(view: ClusterView, *, now: float) -> Decision:
        if view.revision_of(key):
            return Decision()
        command = order(key, encode(DesiredRecord()))
        decided.append(command)
        return Decision(commands=(command,))

    async with candidate(etcd, "one", decide=decide) as one:
        async with asyncio.timeout(DEADLINE_S):
            while not one.cluster.view.revision_of(key):
                await one.cluster.changed(one.cluster.version)
        await client.put(Keys.of("j", "stop"), b"not a record: only the view's version moves")
        await one.cluster.caught_up((await client.status()).revision, timeout_s=DEADLINE_S)
    entry = await client.get(key)
    assert entry is not None
    assert entry.version == 1


async def test_a_decision_overtaken_by_somebody_else_is_taken_anew(etcd: Etcd, client: EtcdClient) -> None:
    """The coordinator compares a revision that has moved on: nothing is written until it decides on the new one."""
    key = Keys.of("j", "desired")
    seen_revisions: list[int] = []

    def decide(view: ClusterView, *, now: float) -> Decision:
        if view.revision_of(Keys.of("j", "done")):
            return Decision()
        wrong = 0 if not seen_revisions else 1
        seen_revisions.append(view.revision_of(key))
        compare = {key: view.revision_of(key) if wrong else 1}
        return Decision(
            commands=(Transaction(job="j", reason="test", compare=compare, puts={Keys.of("j", "done"): b"{}"}),),
            wake_at=now + 0.05,
        )

    await client.put(key, encode(DesiredRecord()))
    async with candidate(etcd, "one", decide=decide) as one, asyncio.timeout(DEADLINE_S):
        while not one.cluster.view.revision_of(Keys.of("j", "done")):
            await one.cluster.changed(one.cluster.version)
    assert len(seen_revisions) >= 2


async def test_a_decision_with_more_notes_than_etcd_takes_in_one_transaction(etcd: Etcd, client: EtcdClient) -> None:
    """A hundred and thirty nodes are charged with a failure: the decision comes first, and all share one lease."""
    key, names = Keys.of("j", "desired"), [f"node-{number:03d}" for number in range(130)]
    leased = {Keys.failure(name, 0): (encode(NodeFailureRecord(at=0.0, text="it was lost")), 60) for name in names}

    def decide(view: ClusterView, *, now: float) -> Decision:
        command = replace(order(key, encode(DesiredRecord())), leased=leased)
        return Decision() if view.revision_of(key) else Decision(commands=(command,))

    async with candidate(etcd, "one", decide=decide) as one, asyncio.timeout(DEADLINE_S):
        while len(one.cluster.view.failures) < len(names):
            await one.cluster.changed(one.cluster.version)
    decided = await client.get(key)
    assert decided is not None
    assert decided.version == 1
    notes = (await client.get_prefix(Keys.FAILURES)).entries
    assert {note.key for note in notes} == set(leased)
    assert {note.lease_id > 0 for note in notes} == {True}
    assert len({note.lease_id for note in notes}) == 1
    revisions = {note.create_revision for note in notes}
    assert min(revisions) > decided.create_revision
    assert len(revisions) == 2


async def test_a_deadline_wakes_the_leader_without_any_change(etcd: Etcd) -> None:
    """Nothing happens in etcd, but the decision asked to be woken: the coordinator is called again at that time."""
    calls: list[float] = []
    woken = asyncio.Event()

    def decide(view: ClusterView, *, now: float) -> Decision:
        calls.append(now)
        if len(calls) >= 6:
            woken.set()
        return Decision(wake_at=now + 0.1)

    async with candidate(etcd, "one", decide=decide):
        await asyncio.wait_for(woken.wait(), DEADLINE_S)
    assert calls[-1] - calls[-2] >= 0.09


async def test_a_deposed_leader_writes_nothing(etcd: Etcd, client: EtcdClient) -> None:
    """The leader key is replaced in the very moment of a decision: the transaction is refused, and it stops leading."""
    key, rival = Keys.of("j", "desired"), encode(LeaderRecord(node="rival", incarnation="9"))
    deposed = asyncio.Event()

    def write_manifest(url: str, manifest: bytes, beat: Beat) -> None:
        """Between the decision and its transaction, in a thread: the rival comes."""
        future = asyncio.run_coroutine_threadsafe(client.put(Keys.LEADER, rival), loop)
        future.result(timeout=DEADLINE_S)
        loop.call_soon_threadsafe(deposed.set)

    def decide(view: ClusterView, *, now: float) -> Decision:
        then = order(key, encode(DesiredRecord()))
        return Decision(commands=(WriteManifest(job="j", url="u", manifest=b"", then=then),))

    loop = asyncio.get_running_loop()
    async with candidate(etcd, "one", decide=decide, write_manifest=write_manifest) as one:
        await asyncio.wait_for(deposed.wait(), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while one.leadership.is_leading:
                await asyncio.sleep(0.01)
    assert await client.get(key) is None
    entry = await client.get(Keys.LEADER)
    assert entry is not None
    assert entry.value == rival


async def test_the_manifest_is_written_before_the_record_that_names_it(etcd: Etcd, client: EtcdClient) -> None:
    """Writing the manifest fails once: the job says why, and has no record until the second attempt has succeeded."""
    key = Keys.of("j", "desired")
    attempts: list[bool] = []

    def write_manifest(url: str, manifest: bytes, beat: Beat) -> None:
        assert (url, manifest) == ("folder", b"manifest")
        record = asyncio.run_coroutine_threadsafe(client.get(key), loop).result(timeout=DEADLINE_S)
        attempts.append(record is None)
        if len(attempts) == 1:
            raise RecoveryError(url, "disk full")

    def decide(view: ClusterView, *, now: float) -> Decision:
        if view.revision_of(key):
            return Decision()
        then = order(key, encode(DesiredRecord()))
        return Decision(commands=(WriteManifest(job="j", url="folder", manifest=b"manifest", then=then),))

    loop = asyncio.get_running_loop()
    async with candidate(etcd, "one", decide=decide, write_manifest=write_manifest) as one, asyncio.timeout(DEADLINE_S):
        while not one.cluster.view.revision_of(key):
            await one.cluster.changed(one.cluster.version)
        assert one.told[0] == ("j", "a decision was not carried out: folder: disk full")
    assert attempts == [True, True]


async def test_a_leader_whose_lease_is_revoked_stops_and_stands_again(etcd: Etcd, client: EtcdClient) -> None:
    """Its lease is ended from outside: it stops leading, and is elected anew under another lease."""
    async with candidate(etcd, "one") as one:
        await one.until_leading()
        first = await client.get(Keys.LEADER)
        assert first is not None
        await client.revoke_lease(first.lease_id)
        async with asyncio.timeout(DEADLINE_S):
            while (entry := await client.get(Keys.LEADER)) is None or entry.lease_id == first.lease_id:
                await asyncio.sleep(0.02)


async def test_a_manifest_that_hangs_is_tried_again(etcd: Etcd, client: EtcdClient) -> None:
    """The checkpoint's file system hangs: the attempt is given up at its deadline, and the next one succeeds.

    When the first one ends after all, somebody is told whose folder it may have written to.
    """
    key = Keys.of("j", "desired")
    attempts: list[str] = []
    released = threading.Event()

    def write_manifest(url: str, manifest: bytes, beat: Beat) -> None:
        attempts.append(url)
        if len(attempts) == 1:
            released.wait(DEADLINE_S)

    def decide(view: ClusterView, *, now: float) -> Decision:
        if view.revision_of(key):
            return Decision()
        then = order(key, encode(DesiredRecord()))
        return Decision(commands=(WriteManifest(job="j", url="folder", manifest=b"manifest", then=then),))

    async with candidate(etcd, "one", decide=decide, write_manifest=write_manifest) as one, asyncio.timeout(DEADLINE_S):
        while not one.cluster.view.revision_of(key):
            await one.cluster.changed(one.cluster.version)
        assert not one.wrote_late
        released.set()
        while not one.wrote_late:
            await asyncio.sleep(0.001)
    assert attempts == ["folder", "folder"]
    assert one.wrote_late == ["j"]


async def test_a_revoked_leader_is_replaced(etcd: Etcd, client: EtcdClient) -> None:
    """Its daemon should end by itself. One that does not, and keeps its lease alive, leads no more for all that."""
    async with candidate(etcd, "thief") as thief:
        await thief.until_leading()
        async with candidate(etcd, "one") as one:
            await client.put(Keys.revoked("Thief"), encode(RevokedRecord(name="Thief", revoked_at=1.0)))
            await until_leader_is(client, "one")
            await one.until_leading()
            async with asyncio.timeout(DEADLINE_S):
                while thief.leadership.is_leading:
                    await asyncio.sleep(0.01)
            await thief.cluster.caught_up((await client.status()).revision, timeout_s=DEADLINE_S)
            assert one.leadership.is_leading, "the two take it from each other"


KEY = Keys.of("j", "desired")


async def test_a_leader_that_hears_nothing_of_its_rival_writes_nothing(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch is dead when a rival takes the leader key, and it decides on what it last saw: the write is refused."""
    is_deciding, has_tried = asyncio.Event(), asyncio.Event()
    is_deaf = False

    def decide(view: ClusterView, *, now: float) -> Decision:
        is_deciding.set()
        order = Transaction(job="j", reason="test", compare={KEY: 0}, puts={KEY: encode(DesiredRecord())})
        return Decision(commands=(order,) if is_deaf else (), wake_at=now + 0.02)

    async with etcd.client() as own:
        write = own.transaction

        async def transaction(compare: Iterable[Compare], changes: Iterable[Change]) -> int:
            try:
                return await write(compare, changes)
            finally:
                if is_deaf:
                    has_tried.set()

        monkeypatch.setattr(own, "transaction", transaction)
        cluster = ClusterWatch(own)
        record = LeaderRecord(node="one", incarnation="1")
        leadership = Leadership(own, cluster, record=record, ttl_s=5, decide=decide, folders=Folders(no_manifest))
        watching, standing = asyncio.create_task(cluster.run()), asyncio.create_task(leadership.run())
        try:
            await asyncio.wait_for(is_deciding.wait(), DEADLINE_S)
            watching.cancel()
            await asyncio.wait([watching])
            await client.put(Keys.LEADER, encode(LeaderRecord(node="rival", incarnation="9")))
            is_deaf = True
            await asyncio.wait_for(has_tried.wait(), DEADLINE_S)
            assert leadership.is_leading, "it heard of the rival after all"
        finally:
            standing.cancel()
            await asyncio.wait([standing])
    assert await client.get(KEY) is None
