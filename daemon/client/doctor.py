"""The checks of `headway doctor`: each gives what was found and, if something is wrong, what to do."""

import asyncio
import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.addresses import split_address
from headway.daemon.base.errors import ConfigError, RecoveryError, StoreError
from headway.daemon.base.interfaces import interface_addresses
from headway.daemon.base.machine_share import folder_in_memory, memory_limit_bytes, num_cores
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import NO_DAEMON, ClusterAddress, ClusterSession, node_client
from headway.daemon.client.doctor_nccl import nccl_findings
from headway.daemon.client.doctor_outcome import LEADERLESS, OF_ETCD, Finding, Outcome, advice_on, outcome_of, plain
from headway.daemon.cluster.binary import BINARY_VARIABLE, binary_release, find_etcd_binary, remark
from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import IDENTITY, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net.certificates import names_in, read_certificate
from headway.daemon.net.reach_dial import CONNECT_S, dial
from headway.daemon.net.reaching import ports_of
from headway.daemon.reports.node_list import plain_sites, set_aside_lines
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


Find = Callable[[], ClusterAddress]
"""Finds the cluster that options, variables or a folder name."""
LEAST_SHARED_BYTES = 256 << 20
DEADLINE = "deadline exceeded"
"""gRPC's words for a call that took too long."""
_PROXIES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_SLOW = frozenset({Outcome.UNCLEAR, Outcome.SILENT, Outcome.HANGS})


def examine_from(source: str, targets: Sequence[str], find: Find) -> list[Finding]:
    """Return a finding for each way from one node to others; no targets: to all.

    Raises ConfigError, and StoreUnreachableError if no local cluster runs.
    """
    address = find()

    async def ask() -> list[Finding]:
        try:
            async with ClusterSession(address) as session:
                return await examine_ways_from(session, await session.view(), source, targets)
        except StoreError as error:
            return [await _away(error, address.etcd)]

    return _said_once(asyncio.run(ask()))


def examine(find: Find | None, *, etcd_binary: Path | None, is_local: bool) -> list[Finding]:
    """Return every finding about this machine, and about its cluster.

    find: None: no cluster is named, and none lies here. is_local: a local cluster is meant, which needs a binary.
    """
    findings = [_looked(*check) for check in _HERE]
    findings.insert(3, _etcd_binary(etcd_binary, is_needed=is_local))
    findings += _web_proxies(os.environ)
    if find is not None:
        findings += _cluster(find)
    return _said_once(findings)


def _looked(what: str, look: Callable[[], str], remedy: str) -> Finding:
    """Return what a look at this machine finds; an error of the system or a package is a fault."""
    try:
        return Finding(what=what, is_fine=True, found=look())
    except (OSError, ImportError) as error:
        return Finding(what=what, is_fine=False, found=str(error), advice=remedy)


def _said_once(findings: list[Finding]) -> list[Finding]:
    """Keep each remark only at its last finding: that on etcd's release at the cluster, that on relays at one way."""
    last = {finding.advice: finding for finding in findings}
    return [
        finding if not finding.is_fine or last[finding.advice] is finding else replace(finding, advice="")
        for finding in findings
    ]


def _torch() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "not installed, and only a machine that computes needs it: `pip install 'headway[node]'`"
    from headway.stages.no_card import why_no_card

    names = [_card(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    headway = importlib.metadata.version("headway")
    return f"{torch.__version__}, headway {headway}, {', '.join(names) or f'CPU only: {why_no_card()}'}"


def _card(properties: Any) -> str:
    """Return a card's name, why torch has no code for it, and its build of FlashAttention 3 or why it has none, if a
    package could bring it.
    """
    import torch

    from headway.stages.attention_kernels import why_no_flash3
    from headway.stages.model.flash3 import installed_build
    from headway.stages.no_card import why_no_code

    if torch.version.hip is not None:
        return f"{properties.name} (ROCm: no such card was tried, and its flash attention may not repeat its bits)"
    if why := why_no_code((properties.major, properties.minor), torch.cuda.get_arch_list()):
        return f"{properties.name} ({why})"
    capability, build = f"{properties.major}.{properties.minor}", installed_build()
    if why_no_flash3("cuda", capability, "any"):
        return str(properties.name)
    return f"{properties.name} (flash3: {why_no_flash3('cuda', capability, build) or build})"


def _machine() -> str:
    limit, whole_bytes = memory_limit_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{whole_bytes / (1 << 30):.1f} GiB of memory, {num_cores():g} cores"
    if limit is not None and limit < whole_bytes:
        found = f"{limit / (1 << 30):.1f} GiB by a cgroup's limit, of the machine's {found}"
    return found


def _loopback() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
    return "can be opened"


def _memory_folder() -> str:
    folder = folder_in_memory()
    if folder is None:
        return (
            "/dev/shm is not there, or small for this memory: they go to the state folder; a tmpfs of half the memory "
            "there makes changes of plan faster (docker run --shm-size)"
        )
    free = shutil.disk_usage(folder).free
    found = f"{folder} has {free >> 20} MiB free"
    if free < LEAST_SHARED_BYTES:
        raise OSError(found)
    return found


def _temporary_folder() -> str:
    with tempfile.TemporaryDirectory(prefix="headway-") as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(Path(folder) / "workers.sock"))
    return f"can be made in {tempfile.gettempdir()}: links inside a node need no TLS"


_HERE: Final[tuple[tuple[str, Callable[[], str], str], ...]] = (
    ("Python", platform.python_version, ""),
    ("torch", _torch, "`pip install 'headway[node]'`"),
    ("memory and cores", _machine, ""),
    ("loopback port", _loopback, "let this user open sockets on 127.0.0.1"),
    (
        "layer files in memory",
        _memory_folder,
        "make it larger, or set store_dir to a folder with room for twice the node's state",
    ),
    (
        "unix sockets",
        _temporary_folder,
        "set TMPDIR to a folder with a short path on a local file system",
    ),
)
"""Each look at this machine: what it looks at, what it finds, and the remedy where it raises OSError or ImportError."""


def _etcd_binary(chosen: Path | None, *, is_needed: bool) -> Finding:
    """Find the etcd binary. It is needed for `headway up`; elsewhere its absence is a remark, unless it was named."""
    try:
        binary = find_etcd_binary(chosen)
        release = binary_release(binary)
        found = f"{binary}, {release}" if release else str(binary)
        return Finding(what="etcd binary", is_fine=True, found=found, advice=remark(release))
    except ConfigError as error:
        is_fine = not (is_needed or chosen or os.environ.get(BINARY_VARIABLE))
        advice = "only `up`, `run` and `demo` need one here"
        return Finding(what="etcd binary", is_fine=is_fine, found=str(error), advice=advice)


def _web_proxies(environment: Mapping[str, str]) -> list[Finding]:
    """Return a remark on the environment's proxies, if there are any. Their addresses may hold a password."""
    names = [name for name in _PROXIES if environment.get(name) or environment.get(name.upper())]
    if not names:
        return []
    advice = (
        "hf:// and s3:// stores and etcd's members among each other obey it: name their hosts in no_proxy; http(s):// "
        """stores obey it only with FSSPEC_HTTP='{"client_kwargs": {"trust_env": true}}'"""
    )
    found = f"{', '.join(names)}: no connection between nodes or to etcd goes through it"
    return [Finding(what="web proxy", is_fine=True, found=found, advice=advice)]


def _cluster(find: Find) -> list[Finding]:
    """Return what is wrong with etcd and the cluster; if it does not answer, that alone."""
    try:
        address = find()
        return asyncio.run(_examined(address))
    except (ConfigError, StoreError) as error:
        return [Finding(what="cluster", is_fine=False, found=str(error))]


async def _examined(address: ClusterAddress) -> list[Finding]:
    try:
        async with ClusterSession(address) as session:
            status = await session.client.status()
            view, full = await session.view(), await session.why_full()
            ways = await examine_ways(session, view)
    except StoreError as error:
        away = await _away(error, address.etcd)
        return [replace(away, what="cluster", found=f"{away.what}: {away.found}"), *await _members(address)]
    leader = view.leader.node if view.leader else "nobody"
    found = f"etcd {status.version}, nodes: {len(view.nodes)}, {leader} leads, jobs: {len(view.jobs)}"
    no_daemon = "" if view.nodes else NO_DAEMON
    advice = "; ".join(filter(None, (no_daemon, remark(status.version), address.certificate_end())))
    cluster = Finding(what="cluster", is_fine=True, found=f"{found}; {plain_sites(view)}", advice=advice)
    if full:
        cluster = Finding(what="cluster", is_fine=False, found=full)
    cards = nccl_findings(view.nodes.values(), interface_addresses(), os.environ)
    return [cluster, *await _members(address), *ways, *_records(view), *cards]


async def _members(address: ClusterAddress) -> list[Finding]:
    """Return the members of etcd that do not answer, or have no majority; a single one is the cluster's finding."""

    async def ask(member: str) -> Finding | None:
        try:
            async with ClusterSession(replace(address, etcd=(member,))) as session:
                if (await session.client.status()).has_leader:
                    return None
        except StoreError as error:
            return await _away(error, (member,))
        outcome = outcome_of(LEADERLESS)
        advice, what = advice_on([outcome], OF_ETCD), f"etcd at {member}"
        return Finding(what=what, is_fine=False, found=LEADERLESS, advice=advice, outcomes=(outcome,))

    if len(address.etcd) == 1:
        return []
    return [found for found in await asyncio.gather(*map(ask, address.etcd)) if found is not None]


def _records(view: ClusterView) -> list[Finding]:
    """Return records in etcd that cannot be read, and certificates that two daemons have."""
    told = {name: node.ailments[IDENTITY] for name, node in sorted(view.nodes.items()) if IDENTITY in node.ailments}
    findings = [Finding(what=f"{IDENTITY} of {name}", is_fine=False, found=text) for name, text in told.items()]
    advice = "a newer release wrote them: update this one; else delete the keys with etcdctl"
    if lines := set_aside_lines(view):
        findings.append(Finding(what="records", is_fine=False, found="; ".join(lines), advice=advice))
    return findings


async def _away(error: StoreError, members: Sequence[str]) -> Finding:
    """Return why etcd does not answer. gRPC often tells no more than that it took too long: TCP tells the rest."""
    outcome, line = outcome_of(error.reason), plain(error.reason)
    if outcome in _SLOW and len(members) == 1:
        if await _is_silent(members[0]):
            outcome, line = Outcome.SILENT, f"no answer to a connection within {CONNECT_S:g} s"
        elif DEADLINE in line.casefold():
            outcome, line = Outcome.HANGS, "it takes connections, but does not answer"
    advice = advice_on([outcome], OF_ETCD)
    return Finding(what=error.target, is_fine=False, found=line, advice=advice, outcomes=(outcome,))


async def _is_silent(member: str) -> bool:
    """Return whether nothing at all comes back from a port."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(*split_address(member, "--etcd"))
    except (OSError, ConfigError) as error:
        return isinstance(error, TimeoutError)
    writer.close()
    return False


async def examine_ways(session: ClusterSession, view: ClusterView) -> list[Finding]:
    """Return one finding for each way from a node to another, and one for all. A reader may not ask for that."""
    names = sorted(view.nodes)[:MOST_NODES]
    if session.identity is None or not names:
        return []
    borne = names_in(read_certificate(session.identity.certificate, CERTIFICATE_FILE))
    if not roles_among(borne) & {Role.OPERATOR, Role.NODE}:
        found = f"not tried: {holder(borne)} may not ask the daemons"
        return [Finding(what=ALL_WAYS, is_fine=True, found=found, advice="an operator's `headway doctor` tries them")]
    async with node_client(session.identity) as client:
        answers = await asyncio.gather(*(_ask(client, session.identity, view, name, names) for name in names))
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
    async with node_client(session.identity) as client:
        return await _ask(client, session.identity, view, source, sorted(set(targets or view.nodes) - {source}))


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
