"""A lease is renewed until its holder ends it, whatever grpc makes of a cancellation."""

import asyncio

from headway.daemon.cluster.lease import Lease


async def test_a_renewal_that_grpc_cancels_is_repeated() -> None:
    """Another task has closed the channel: nobody wants the lease to end."""
    num, again = 0, asyncio.Event()

    async def renew(lease_id: int, *, timeout_s: float) -> int:
        nonlocal num
        num += 1
        if num == 1:
            raise asyncio.CancelledError
        again.set()
        return 1

    async def revoke(lease_id: int) -> None:
        return None

    lease = Lease(7, ttl_s=1, is_strict=False, renew=renew, revoke=revoke, target="etcd")
    async with asyncio.timeout(10.0):
        await again.wait()
        lease.check()
        await lease.revoke()
    assert lease.lost.is_set()
