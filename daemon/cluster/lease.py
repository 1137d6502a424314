"""A lease from its holder's side: kept alive in the background until it is revoked or lost."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from headway.daemon.base.errors import LeaseLostError, StoreError, StoreUnreachableError

RENEWALS_PER_TTL = 3
RETRY_PAUSE_S = 0.2
OVERDUE_TIMEOUT_S = 2.0
"""Timeout of each attempt to renew a lease that may have run out while etcd was away."""


class Renew(Protocol):
    """Renews once; returns the seconds granted."""

    def __call__(self, lease_id: int, *, timeout_s: float) -> Awaitable[int]: ...


class Revoke(Protocol):
    """Ends a lease at once."""

    def __call__(self, lease_id: int) -> Awaitable[None]: ...


class Lease:
    """Keeps keys alive as long as this process runs and reaches etcd.

    A strict lease is lost no later than etcd ends it: its deadline counts from when a renewal was sent, and no code may
    act under it afterwards. A lenient lease is lost only when etcd says so. An unreachable etcd ends no lease, and a
    restarted one gives every lease its full time again.

    Neither is a lock: a holder that was stopped for a while may act before it notices. So a decision under a lease
    compares, in its transaction, the revision of a key under the lease.

    """

    def __init__(
        self, lease_id: int, *, ttl_s: int, is_strict: bool, renew: Renew, revoke: Revoke, target: str
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        """Time to live, as granted."""
        self.is_strict = is_strict
        self.lost = asyncio.Event()
        """Set once, when the lease is over: unknown to etcd, revoked here or, if strict, not renewed in time."""
        self.reason = ""
        """Reason why it was lost."""
        self._renew = renew
        self._revoke = revoke
        self._target = target
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + ttl_s
        self._keepalive = asyncio.create_task(self._keep_alive(), name=f"lease {lease_id:x}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.revoke()

    @property
    def remaining_s(self) -> float:
        """Return for how many seconds the lease certainly lasts; 0: it is lost or its state is unknown."""
        return 0.0 if self.lost.is_set() else max(self._deadline - self._clock(), 0.0)

    def check(self) -> None:
        """Raise LeaseLostError when the lease is lost or, for a strict one, does not certainly hold now."""
        if self.lost.is_set() or (self.is_strict and self.remaining_s <= 0):
            raise LeaseLostError(self._target, self.reason or f"lease {self.id:x} ran out")

    async def revoke(self) -> None:
        """Stop renewing and end the lease; its keys are deleted at once. Idempotent.

        If etcd does not answer, the lease expires by itself: that is no error here.
        """
        was_lost = self.lost.is_set()
        self._lose("revoked by its holder")
        self._keepalive.cancel()
        await asyncio.wait([self._keepalive])
        if not was_lost:
            with suppress(StoreUnreachableError):
                await self._revoke(self.id)

    async def _keep_alive(self) -> None:
        try:
            while True:
                await asyncio.sleep(max(self._deadline - self._clock() - self._rest_s, 0.0))
                try:
                    await self._renew_once()
                except asyncio.CancelledError:
                    # grpc says so too when somebody closes the channel, and then nobody wants this to end
                    if (ours := asyncio.current_task()) is not None and ours.cancelling():
                        raise
        except LeaseLostError as error:
            self._lose(error.reason)
        except Exception as error:  # a bug of ours: nothing renews this lease any more
            self._lose(str(error))

    @property
    def _rest_s(self) -> float:
        """Return how much of a full lease is left when it is time to renew."""
        return self.ttl_s * (1 - 1 / RENEWALS_PER_TTL)

    async def _renew_once(self) -> None:
        """Try until etcd has renewed the lease. Raises LeaseLostError when it is lost."""
        problem = ""
        while True:
            sent_at = self._clock()
            left = self._deadline - sent_at
            if self.is_strict and left <= 0:
                raise LeaseLostError(
                    self._target, f"lease {self.id:x} was not renewed within {self.ttl_s} s ({problem})"
                )
            timeout_s = left if self.is_strict else max(left, OVERDUE_TIMEOUT_S)
            try:
                self._deadline = sent_at + await self._renew(self.id, timeout_s=timeout_s)
                return
            except LeaseLostError:
                raise
            except StoreError as error:
                problem = error.reason
                await asyncio.sleep(RETRY_PAUSE_S)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
