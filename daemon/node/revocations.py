"""Follows which certificates are revoked: their holders' calls end, and a daemon whose own one is revoked ends too."""

import asyncio
from collections.abc import Callable, Collection, Iterable

import structlog

from headway.daemon.base.errors import ConfigError
from headway.daemon.decide.cluster_watch import ClusterWatch

log = structlog.get_logger()


class Revocations:
    """For one daemon."""

    def __init__(
        self,
        cluster: ClusterWatch,
        *,
        names: Iterable[str],
        where: str,
        revoke: Callable[[Collection[str]], None],
        on_own: Callable[[ConfigError], None],
    ) -> None:
        """names: in this node's own certificate. where: that one. revoke: refuses names, in small letters. on_own: ends
        this daemon.
        """
        self._cluster = cluster
        self._names = tuple(names)
        self._where = where
        self._revoke = revoke
        self._on_own = on_own
        self.known = asyncio.Event()
        """Set once etcd has told who is revoked. Before, nobody is to be answered."""

    async def run(self) -> None:
        """Follow the cluster until cancelled. While etcd is away, what was revoked before stays so."""
        seen, known = -1, frozenset[str]()
        while True:
            seen = await self._cluster.changed(seen)
            view = self._cluster.view
            if (now := frozenset(view.revoked)) != known:
                log.info("certificates_revoked", names=sorted(now - known), restored=sorted(known - now))
                known = now
                self._revoke(now)
                own = next(filter(view.is_revoked, self._names), None)
                if own is not None:
                    self._on_own(self._own_end(own))
            if self._cluster.revision:
                self.known.set()

    def _own_end(self, name: str) -> ConfigError:
        by = self._cluster.view.revoked[name.casefold()].revoked_by or "somebody"
        what = f"{by} has revoked {name}: `headway certs restore {name}` undoes that, or join under another name"
        return ConfigError(what, self._where)
