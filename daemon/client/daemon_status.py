"""Asks daemons for the state of jobs, while etcd is away."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.errors import ConfigError
from headway.daemon.reports.job_report import JobReport, duration
from headway.daemon.rpc.peer_client import NodeClient
from headway.stages.errors import PeerError, ProtocolError, UnavailableError
from headway.stages.sockets.tls_identity import TlsIdentity

ANSWER_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """One daemon's answer."""

    node: str
    etcd_reachable: bool
    etcd_away_s: float
    waits_for: str
    jobs: dict[str, Any]
    """Job to its report, as plain values."""

    def report(self, job: str) -> JobReport:
        """Return the report of one job. Raises ConfigError with the names that the daemon knows."""
        if job not in self.jobs:
            known = ", ".join(self.jobs) or "none"
            raise ConfigError(f"no such job; node {self.node} knows {known}", f"job {job}")
        return msgspec.convert(self.jobs[job], JobReport)

    @property
    def line(self) -> str:
        """Return a line that says whether etcd answers and, if it does not, what waits for it."""
        if self.etcd_reachable:
            return f"node {self.node} reaches etcd"
        return (
            f"etcd has been away for {duration(self.etcd_away_s)}, says node {self.node}; training continues; "
            f"these wait for etcd: {self.waits_for}"
        )


async def ask_daemons(addresses: Sequence[str | NodeEndpoint], identity: TlsIdentity | None) -> DaemonStatus:
    """Return the answer of the first daemon that answers. Raises UnavailableError, naming all, when none does."""
    if identity is None:
        raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
    client = NodeClient(identity)
    reasons = []
    try:
        for address in addresses:
            try:
                endpoint = address if isinstance(address, NodeEndpoint) else NodeEndpoint("", address)
                reply = await client.status(endpoint, timeout_s=ANSWER_TIMEOUT_S)
                return DaemonStatus(
                    node=reply.node,
                    etcd_reachable=reply.etcd_reachable,
                    etcd_away_s=reply.etcd_away_s,
                    waits_for=reply.waits_for,
                    jobs=msgspec.json.decode(reply.jobs),
                )
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"node at {address}", f"sent an unreadable status: {error}") from error
            except PeerError as error:
                reasons.append(str(error))
    finally:
        await client.close()
    raise UnavailableError(", ".join(map(str, addresses)), "; ".join(reasons))
