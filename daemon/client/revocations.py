"""The requests that people make about certificates: revoke a name, restore it, list what is known."""

import time
from dataclasses import dataclass

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submitter
from headway.daemon.errors import ConfigError
from headway.daemon.etcd.transaction import Delete, Put
from headway.daemon.names import LOCAL_HOSTS, NODE_NAME_RULE, is_node_name
from headway.daemon.records.certificate_records import RevokedRecord
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.rpc.certificates import names_in, own_names
from headway.daemon.rpc.own_certificate import read_certificate
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE


@dataclass(frozen=True, slots=True)
class KnownCertificate:
    """What the cluster knows of the certificates of one name. Times in seconds since 1970; None: not known."""

    name: str
    role: str
    """Empty: it was made by `headway certs`, or by another authority."""
    issued_at: float | None
    expires_at: float | None
    revoked_at: float | None
    revoked_by: str
    is_present: bool
    """True if a node of this name is in the cluster now."""


async def revoke(session: ClusterSession, names: list[str]) -> list[str]:
    """Let no certificate of these names count any more. Return a sentence for each. Raises ConfigError."""
    view = await session.view()
    own = {each.casefold() for each in _own_names(session)}
    for name in names:
        if not is_node_name(name) or name.casefold() in LOCAL_HOSTS:
            raise ConfigError(f"{name!r} cannot be the name of a certificate: one has {NODE_NAME_RULE}", "NAME")
        if name.casefold() in own:
            what = "is in your own certificate: another operator revokes it, so that the cluster keeps one"
            raise ConfigError(what, name)
    mine = next(iter(_own_names(session)), "")
    told, now, who = [], time.time(), f"{mine} ({submitter()})" if mine else submitter()
    for name in names:
        if view.is_revoked(name):
            told.append(f"{name}: is revoked already")
            continue
        record = RevokedRecord(name=name, revoked_at=now, revoked_by=who)
        await session.client.transaction([], [Put(Keys.revoked(name), encode(record))])
        is_known = name.casefold() in view.issued or name in view.nodes
        known = "" if is_known else "; no node and no invited certificate bears this name: is it spelled right?"
        told.append(f"{name}: revoked{known}")
    return told


async def in_etcd(session: ClusterSession, names: list[str]) -> str:
    """Return what these names' holders can still do in etcd, and how that ends, in a sentence."""
    if await session.client.has_users():
        ends = "; ".join(f"etcdctl user delete {name}" for name in names)
        return f"etcd has users, and takes these certificates until theirs are deleted: {ends}"
    return f"this etcd has no users: {', '.join(names)} can still write to it; see docs/security.md#etcd"


async def restore(session: ClusterSession, names: list[str]) -> list[str]:
    """Let the certificates of these names count again. Return a sentence for each. Raises ConfigError."""
    view = await session.view()
    own = {each.casefold() for each in _own_names(session)}
    for name in names:
        if not view.is_revoked(name):
            raise ConfigError("is not revoked", name)
        if name.casefold() in own:
            raise ConfigError("is in your own certificate: an operator of another name restores it", name)
    await session.client.transaction([], [Delete(Keys.revoked(name)) for name in names])
    return [f"{name}: its certificates count again" for name in names]


def _own_names(session: ClusterSession) -> tuple[str, ...]:
    if session.identity is None:
        return ()
    return own_names(names_in(read_certificate(session.identity.certificate, CERTIFICATE_FILE)))


async def known_certificates(session: ClusterSession) -> list[KnownCertificate]:
    """Return what the cluster knows of certificates, by name: of nodes, of who was invited, of who is revoked."""
    view = await session.view()
    nodes = {name.casefold(): name for name in view.nodes}
    found = []
    for key in sorted(nodes.keys() | view.issued.keys() | view.revoked.keys()):
        issued, revoked = view.issued.get(key), view.revoked.get(key)
        name = nodes.get(key) or (issued.name if issued is not None else revoked.name if revoked is not None else key)
        role = issued.role if issued is not None else "node" if key in nodes else ""
        found.append(
            KnownCertificate(
                name,
                role,
                issued.issued_at if issued is not None else None,
                issued.expires_at if issued is not None else None,
                revoked.revoked_at if revoked is not None else None,
                revoked.revoked_by if revoked is not None else "",
                key in nodes,
            )
        )
    return found
