"""The findings of `headway doctor` about the ways between nodes: each daemon dials the others, as their peers would."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.doctor.findings import Finding
from headway.daemon.doctor.outcome import Outcome, advice_on, outcome_of, plain
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.reach.reach_dial import dial
from headway.daemon.reach.reaching import ports_of
from headway.daemon.records.measurements import Port
from headway.daemon.records.records import NodeRecord
from headway.daemon.rpc.certificates import names_in
from headway.daemon.rpc.own_certificate import read_certificate
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.view.cluster_view import ClusterView
from headway.proto.control_pb2 import DialledPort
from headway.stages.errors import PeerError
from headway.stages.sockets.roles import Role, holder, roles_among
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, TlsIdentity

MOST_NODES: Final = 16
"""Maximum number of nodes asked, the first by name; these nodes dial each other."""
ALL_WAYS: Final = "ways between nodes"
HERE: Final = "this machine"
WORKER_PORTS: Final = "set its `one_port`, so that workers need no port of their own; or `worker_ports`, and open those"
MOST_LISTED: Final = 20
"""Maximum number of ways listed. If there are more, those that answer are only counted."""


async def examine_ways(session: ClusterSession, view: ClusterView) -> list[Finding]:
    """Return one finding for each way from a node to another, and one for all. A reader may not ask for that."""
    names = sorted(view.nodes)[:MOST_NODES]
    if session.identity is None or not names:
        return []
    borne = names_in(read_certificate(session.identity.certificate, CERTIFICATE_FILE))
    if not roles_among(borne) & {Role.OPERATOR, Role.NODE}:
        found = f"not tried: {holder(borne)} may not ask the daemons"
        return [Finding(what=ALL_WAYS, is_fine=True, found=found, advice="an operator's `headway doctor` tries them")]
    client = NodeClient(session.identity)
    try:
        answers = await asyncio.gather(*(_ask(client, session.identity, view, name, names) for name in names))
    finally:
        await client.close()
    ways = [way for answer in answers for way in answer]
    blocked = [way for way in ways if not way.is_fine]
    listed = ways if len(ways) <= MOST_LISTED else blocked
    left_out = len(view.nodes) - len(names)
    found = f"{len(ways) - len(blocked)} of {len(ways)} answer"
    if left_out:
        found += f"; {left_out} more nodes were not asked"
    return [*listed, Finding(what=ALL_WAYS, is_fine=not blocked, found=found)] if ways else []


async def examine_ways_from(
    session: ClusterSession, view: ClusterView, source: str, targets: Sequence[str]
) -> list[Finding]:
    """Return one finding for each way from one node to others, as that node's daemon dials them now.

    targets: empty stands for all others. Raises ConfigError for a name that no node has, or without a certificate.
    """
    for name in (source, *targets):
        if name not in view.nodes:
            known = ", ".join(sorted(view.nodes)[:MOST_LISTED]) or "none"
            raise ConfigError(f"no node has this name; the cluster has {known}", name)
    if session.identity is None:
        raise ConfigError("an operator's or a node's certificate is needed", "--certs")
    client = NodeClient(session.identity)
    try:
        return await _ask(client, session.identity, view, source, sorted(set(targets or view.nodes) - {source}))
    finally:
        await client.close()


async def _ask(
    client: NodeClient, identity: TlsIdentity, view: ClusterView, source: str, names: Sequence[str]
) -> list[Finding]:
    others = [name for name in names if name != source]
    try:
        reply = await client.dial_peers(view.nodes[source].endpoint, others)
    except (PeerError, RecoveryError) as error:
        return [await _from_here(identity, view.nodes[source], error)]
    return [way_of(source, other, [port for port in reply.ports if port.node == other]) for other in others]


async def _from_here(identity: TlsIdentity, node: NodeRecord, error: Exception) -> Finding:
    """Return why a daemon could not be asked: this machine dials it as a node would, which tells more than a call."""
    daemon = next(target for target in ports_of(node) if target.port is Port.DAEMON)
    reason = await dial(daemon, identity, source=HERE)
    if not reason:  # it answers, but not this question
        advice = "the ways from it were not tried: see its log, or ask again"
        return Finding(what=f"{HERE} → {node.name}", is_fine=False, found=str(error), advice=advice)
    port = DialledPort(node=node.name, port=str(daemon.port), address=daemon.address, reason=reason)
    return way_of(HERE, node.name, [port])


def way_of(source: str, target: str, ports: Iterable[DialledPort]) -> Finding:
    """Return the finding of one way: which ports of the target answered the source."""
    told, what = list(ports), f"{source} → {target}"
    if not told:
        return Finding(what=what, is_fine=True, found="the node is no longer registered")
    silent = [port for port in told if port.reason]
    outcomes = [outcome_of(port.reason, port.address) for port in silent or told]
    return Finding(
        what=what,
        is_fine=not silent,
        found="; ".join(_refusal(source, port) for port in silent) or ", ".join(map(_answer, told)),
        advice=WORKER_PORTS if silent and _only_workers(silent, outcomes) else advice_on(outcomes),
        outcomes=tuple(outcomes),
    )


def _only_workers(silent: Iterable[DialledPort], outcomes: Iterable[Outcome]) -> bool:
    """Return whether the network lets the daemon's port through, but no worker's."""
    is_closed = {Outcome.REFUSED, Outcome.SILENT, Outcome.NO_ROUTE}.issuperset(outcomes)
    return is_closed and all(port.port == Port.WORKER for port in silent)


def _refusal(source: str, port: DialledPort) -> str:
    """The line is that of the side that dials, and speaks of itself."""
    line = plain(port.reason).replace("this machine's", f"{source}'s").replace("this side's", f"{source}'s")
    return f"its {port.port} at {port.address}: {line}"


def _answer(port: DialledPort) -> str:
    took = f" in {1e3 * port.seconds:.0f} ms" if port.seconds else ""
    return f"{port.port} at {port.address} answers{took}"
