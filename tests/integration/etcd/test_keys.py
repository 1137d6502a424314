"""Keys, transactions and leases against a real etcd with TLS."""

import asyncio

import pytest

from headway.daemon.base.errors import ConflictError, LeaseLostError, StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.proto import etcd_pb2


async def test_a_key_is_put_read_and_deleted(client: EtcdClient) -> None:
    """An absent key reads as None; a put one with its value and revisions; a deleted one as None again."""
    assert await client.get("/a") is None
    first = await client.put("/a", b"1")
    second = await client.put("/a", b"2")
    found = await client.get("/a")
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.version) == (b"2", first, second, 2)
    assert await client.delete("/a") is True
    assert await client.delete("/a") is False
    assert await client.get("/a") is None


async def test_a_prefix_of_many_pages_is_read_as_of_one_revision(client: EtcdClient) -> None:
    """25 keys in pages of 4, a neighbour outside the prefix: all 25, sorted, once each."""
    revision = 0
    for index in range(25):
        revision = await client.put(f"/many/{index:02d}", str(index).encode())
    await client.put("/manz", b"outside")
    snapshot = await client.get_prefix("/many/", page_keys=4)
    assert [entry.key for entry in snapshot.entries] == [f"/many/{index:02d}" for index in range(25)]
    assert snapshot.revision == revision + 1
    await client.transaction([], [Delete("/many/", is_prefix=True)])
    assert [entry.key for entry in (await client.get_prefix("")).entries] == ["/manz"]


async def test_a_slow_line_gets_smaller_pages(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key takes the time of a tenth of a call, and the last ones three times as long: no page of 64 comes."""
    for index in range(40):
        await client.put(f"/slow/{index:02d}", b"x" * (3 if index >= 30 else 1))
    answer, limits = client._range, list[int]()

    async def answered(request: etcd_pb2.RangeRequest) -> etcd_pb2.RangeResponse:
        limits.append(request.limit)
        reply = await answer(request)
        if sum(len(entry.value) for entry in reply.kvs) > 10:
            raise StoreUnreachableError("etcd", "no answer within 5 s")
        return reply

    monkeypatch.setattr(client, "_range", answered)
    for _ in range(2):  # nothing has come yet, so etcd may be away
        with pytest.raises(StoreUnreachableError):
            await client.get_prefix("/slow/")
    assert len((await client.get_prefix("/slow/")).entries) == 40
    assert limits[:5] == [64, 16, 4, 8, 16]
    assert limits[5:10] == [4] * 5
    assert set(limits[10:]) == {1, 4}


async def test_a_value_larger_than_a_default_message_arrives(client: EtcdClient) -> None:
    """Six values of 1 MiB are one answer of 6 MiB, above gRPC's default limit of 4."""
    for index in range(6):
        await client.put(f"/big/{index}", bytes([index]) * 2**20)
    assert sum(len(entry.value) for entry in (await client.get_prefix("/big/")).entries) == 6 * 2**20


async def test_a_transaction_makes_all_changes_in_one_revision(client: EtcdClient) -> None:
    """Compare one key, put two, delete a prefix: all carry the revision that is returned."""
    before = await client.put("/old/a", b"")
    revision = await client.transaction(
        [Compare.unchanged("/old/a", before), Compare.absent("/new")],
        [Put("/new", b"n"), Put("/other", b"o"), Delete("/old/", is_prefix=True)],
    )
    entries = (await client.get_prefix("/")).entries
    assert {entry.key: entry.mod_revision for entry in entries} == {"/new": revision, "/other": revision}


@pytest.mark.parametrize(
    "condition",
    [
        Compare.absent("/k"),
        Compare.present("/other"),
        Compare.unchanged("/k", 1),
    ],
    ids=lambda condition: f"{condition.key}-{condition.mod_revision}",
)
async def test_a_transaction_whose_comparison_fails_changes_nothing(client: EtcdClient, condition: Compare) -> None:
    """The key has another value or revision than expected: ConflictError names it, and nothing is written."""
    await client.put("/k", b"value")
    with pytest.raises(ConflictError, match=condition.key):
        await client.transaction([condition], [Put("/written", b"")])
    assert await client.get("/written") is None


async def test_of_two_racing_writers_one_wins(client: EtcdClient) -> None:
    """Ten transactions create the same key at once: one succeeds, nine get ConflictError."""
    attempts = [client.transaction([Compare.absent("/won")], [Put("/won", bytes([n]))]) for n in range(10)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, ConflictError) for result in results) == 9


async def test_a_lease_takes_its_keys_along_when_it_is_revoked(client: EtcdClient) -> None:
    """Two keys hang on a lease, one does not: after revoke only that one is left, and the lease says it is lost."""
    lease = await client.grant_lease(10)
    await client.put("/leased/a", b"", lease_id=lease.id)
    await client.transaction([], [Put("/leased/b", b"", lease.id), Put("/kept", b"")])
    held = {entry.key for entry in (await client.get_prefix("/")).entries if entry.lease_id == lease.id}
    assert held == {"/leased/a", "/leased/b"}
    lease.check()
    await lease.revoke()
    assert [entry.key for entry in (await client.get_prefix("/")).entries] == ["/kept"]
    assert lease.lost.is_set()
    assert lease.remaining_s == 0
    with pytest.raises(LeaseLostError, match="revoked"):
        lease.check()


async def test_a_lease_lives_on_while_its_holder_does(client: EtcdClient) -> None:
    """A lease of one second is still there after almost two, and its key too."""
    async with await client.grant_lease(1) as lease:
        await client.put("/alive", b"", lease_id=lease.id)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lease.lost.wait(), 1.8)
        assert await client.get("/alive") is not None


async def test_a_lease_that_etcd_ended_is_lost(client: EtcdClient) -> None:
    """Somebody else revokes it, twice: its keys are gone, its holder finds out at the next renewal, and why."""
    lease = await client.grant_lease(2)
    await client.put("/leased", b"", lease_id=lease.id)
    entry = await client.get("/leased")
    assert entry is not None
    assert entry.lease_id == lease.id
    assert [listed.lease_id for listed in (await client.get_prefix("/leased")).entries] == [lease.id]
    await client.revoke_lease(entry.lease_id)
    await client.revoke_lease(entry.lease_id)
    assert await client.get("/leased") is None
    await asyncio.wait_for(lease.lost.wait(), 10)
    assert "expired" in lease.reason
    with pytest.raises(LeaseLostError):
        await client.put("/late", b"", lease_id=lease.id)
    await lease.revoke()
