"""The requests that people make about certificates: invite, renew, revoke, restore, list.

A folder's key and certificate are two files, and a process may die between them. At a renewal the certificate goes
first: then the next key is still there, and another call puts it in its place.
"""

import shlex
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from headway.daemon.base.addresses import LOCAL_HOSTS, NODE_NAME_RULE, NodeEndpoint, is_node_name, split_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.client.cluster_access import NO_DAEMON, ClusterSession, first_answer, names_of, node_client
from headway.daemon.client.job_requests import submitter
from headway.daemon.cluster.cluster_records import RevokedRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Delete, Put
from headway.daemon.net.certificates import CLOCK_SKEW, issuer_of, names_in, read_certificate, write_private
from headway.daemon.net.join_token import SERVER_NAME, JoinToken, write_token
from headway.daemon.net.renewals import asked_of_authority
from headway.daemon.net.signing_request import NEXT_KEY, next_key, signing_request
from headway.proto import control_pb2
from headway.stages.durable import make_durable
from headway.stages.errors import ProtocolError
from headway.stages.sockets.roles import Role, roles_among
from headway.stages.sockets.shared_port import listening_ports, shared_address
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE


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
    """Let no certificate of these names count any more. Raises ConfigError.

    Returns a sentence for each, and one about what their holders can still do in etcd.
    """
    view, mine = await session.view(), names_of(session.identity)
    for name in names:
        if not is_node_name(name) or name.casefold() in LOCAL_HOSTS:
            raise ConfigError(f"{name!r} cannot be the name of a certificate: one has {NODE_NAME_RULE}", "NAME")
        if name.casefold() in map(str.casefold, mine):
            what = "is in your own certificate: another operator revokes it, so that the cluster keeps one"
            raise ConfigError(what, name)
    told, now, who = [], time.time(), f"{mine[0]} ({submitter()})" if mine else submitter()
    for name in names:
        if view.is_revoked(name):
            told.append(f"{name}: is revoked already")
            continue
        record = RevokedRecord(name=name, revoked_at=now, revoked_by=who)
        await session.client.transaction([], [Put(Keys.revoked(name), encode(record))])
        is_known = name.casefold() in view.issued or name in view.nodes
        known = "" if is_known else "; no node and no invited certificate bears this name: is it spelled right?"
        told.append(f"{name}: revoked{known}")
    return [*told, await _in_etcd(session, names)]


async def _in_etcd(session: ClusterSession, names: list[str]) -> str:
    if await session.client.has_users():
        ends = "; ".join(f"etcdctl user delete {name}" for name in names)
        return f"etcd has users, and takes these certificates until theirs are deleted: {ends}"
    return f"this etcd has no users: {', '.join(names)} can still write to it; see docs/security.md#etcd"


async def restore(session: ClusterSession, names: list[str]) -> list[str]:
    """Let the certificates of these names count again. Return a sentence for each. Raises ConfigError."""
    view, mine = await session.view(), names_of(session.identity)
    for name in names:
        if not view.is_revoked(name):
            raise ConfigError("is not revoked", name)
        if name.casefold() in map(str.casefold, mine):
            raise ConfigError("is in your own certificate: an operator of another name restores it", name)
    await session.client.transaction([], [Delete(Keys.revoked(name)) for name in names])
    return [f"{name}: its certificates count again" for name in names]


def made_certificates(authority: Path) -> list[KnownCertificate]:
    """Return what `headway certs` has made and kept in an authority's folder, by name. Raises ConfigError."""
    found = []
    for path in sorted(authority.glob(f"*/{CERTIFICATE_FILE}")):
        try:
            made = read_certificate(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", str(path)) from error
        role = next(iter(roles_among(names_in(made))), "")
        first, last = made.not_valid_before_utc + CLOCK_SKEW, made.not_valid_after_utc
        times = (first.timestamp(), last.timestamp())
        found.append(KnownCertificate(path.parent.name, str(role), *times, None, "", False))
    if not found:
        raise ConfigError("has no certificates: name the folder of `headway certs`", str(authority))
    return found


async def known_certificates(session: ClusterSession, made: Iterable[KnownCertificate] = ()) -> list[KnownCertificate]:
    """Return what the cluster knows of certificates, by name: of nodes, of who was invited, of who is revoked.

    made: of an authority's folder; what the cluster knows of these names is added to them.
    """
    view = await session.view()
    nodes = {name.casefold(): name for name in view.nodes}
    by_folder = {one.name.casefold(): one for one in made}
    found = []
    for key in sorted(nodes.keys() | view.issued.keys() | view.revoked.keys() | by_folder.keys()):
        issued, revoked, kept = view.issued.get(key), view.revoked.get(key), by_folder.get(key)
        name = nodes.get(key) or next(one.name for one in (issued, revoked, kept) if one is not None)
        known = issued or kept  # an invited name has a newer one than the folder
        found.append(
            KnownCertificate(
                name,
                known.role if known is not None else "node" if key in nodes else "",
                known.issued_at if known is not None else None,
                known.expires_at if known is not None else None,
                revoked.revoked_at if revoked is not None else None,
                revoked.revoked_by if revoked is not None else "",
                key in nodes,
            )
        )
    return found


def etcd_commands(users: Mapping[str, Role], *, has_users: bool = False) -> list[str]:
    """Return etcdctl's commands for users with the names of certificates, each with what its role needs. Pure.

    has_users: roles are there, and users are asked for already. A node writes what daemons write: no invitation,
    certificate or revocation. So a node with the authority is told of as an operator.
    """
    every, until = Keys.REVOKED, f"{PREFIX[:-1]}0"  # the key behind all that begin with the prefix
    ranges = [(PREFIX, Keys.INVITATIONS), (Keys.JOBS, every), (Keys.SHARES, until)]
    found = []
    if not has_users:
        found += [f"role add headway-{role}" for role in Role]
        grant = "role grant-permission"
        found.append(f"{grant} --prefix=true headway-{Role.READER} read {PREFIX}")
        found.append(f"{grant} --prefix=true headway-{Role.OPERATOR} readwrite {PREFIX}")
        found += [f"{grant} headway-{Role.NODE} readwrite {first} {end}" for first, end in ranges]
        found += ["user add --no-password root", "user grant-role root root"]
    for name, role in sorted(users.items()):
        found.append(f"user add --no-password {name}")
        roles = [Role.NODE, Role.READER] if role is Role.NODE else [role]
        found += [f"user grant-role {name} headway-{each}" for each in roles]
    return [f"etcdctl {each}" for each in (found if has_users else [*found, "auth enable"])]


async def etcd_users(session: ClusterSession, told: Mapping[str, Role]) -> list[str]:
    """Return etcdctl's commands for users that are told. Without any, or before etcd has users: also for all whom the
    cluster knows. Raises StoreError; ConfigError if nobody would be an operator.
    """
    view, has_users = await session.view(), await session.client.has_users()
    users: dict[str, Role] = {}
    if not (told and has_users):
        roles = {role.value: role for role in Role}
        users = {record.name: roles[record.role] for record in view.issued.values() if record.role in roles}
        users |= dict.fromkeys(view.nodes, Role.NODE)
        # A shell reads what is printed, and etcd may hold any text: what is no name is left out.
        users = {name: role for name, role in users.items() if is_node_name(name) and not view.is_revoked(name)}
    users = {name: role for name, role in (users | dict(told)).items() if name != "root"}
    if not has_users and Role.OPERATOR not in users.values():
        what = (
            "nobody could change anything once etcd asks for users: name yourself and the node with the authority, as"
        )
        raise ConfigError(f"{what} in --operator me --operator node-a", "etcd-users")
    # Records say who is an operator, and before there are users anybody may have written them.
    above = [f"# may write everything: {name}; is that right?" for name in users if users[name] is Role.OPERATOR]
    return [*sorted(above), *etcd_commands(users, has_users=has_users)]


MAX_ADDRESSES = 3
"""In a token, which people copy."""


async def invite(
    session: ClusterSession,
    name: str,
    *,
    role: str,
    hosts: Sequence[str],
    lasts_s: float,
    valid_s: float,
    again: bool = False,
    etcd: Sequence[str] = (),
) -> str:
    """Return the token with which somebody joins once. etcd: its members as the new machine dials them; empty: as here.

    Raises ConfigError: nobody may be invited by this name, or no daemon invites; UnavailableError.
    """
    if session.identity is None:
        raise ConfigError("an operator's certificate is needed", "--certs")
    nodes = (await session.view()).nodes.values()
    if not nodes:
        raise ConfigError(NO_DAEMON, "invite")
    signers = sorted((node for node in nodes if node.has_authority), key=lambda node: node.name)
    if not signers:
        what = "no daemon has the authority: set `authority` in the settings of one, or use `headway certs`"
        raise ConfigError(what, "invite")
    members = tuple(etcd) or session.address.etcd
    if not etcd:
        _check_members(members, signers)
    request = control_pb2.InviteRequest(
        name=name, role=role, hosts=hosts, etcd=members, lasts_s=lasts_s, valid_s=valid_s, again=again
    )

    async def ask(daemon: NodeEndpoint) -> tuple[NodeEndpoint, control_pb2.InviteReply]:
        try:
            return daemon, await client.invite(daemon, request)
        except ProtocolError as error:
            raise ConfigError(error.reason, "invite") from error

    async with node_client(session.identity) as client:
        signer, reply = await first_answer((node.endpoint for node in signers), ask)
    asked_first = sorted(signers, key=lambda node: node.endpoint != signer)
    addresses = tuple(shared_address(node.address, SERVER_NAME) for node in asked_first[:MAX_ADDRESSES])
    return write_token(JoinToken(name, addresses, reply.ca_sha256, reply.secret))


MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ListedHost:
    """A line of a list of those to invite: `NAME[=HOST,…] [option of headway join]…`."""

    where: str
    """`FILE:LINE`"""
    name: str
    hosts: tuple[str, ...]
    options: str
    """Options of its `headway join`, as they are typed."""


def read_list(path: Path, *, options: Collection[str]) -> list[ListedHost]:
    """Return the lines of a list; `#` begins a comment. Raises ConfigError, with the number of the broken line.

    options: those that a line may have, each with a value: none for people.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LIST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}", str(path)) from error
    if len(text) > MAX_LIST_BYTES:
        raise ConfigError(f"has more than {MAX_LIST_BYTES} bytes: it is no list of hosts", str(path))
    found: dict[str, ListedHost] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            told, *words = shlex.split(line, comments=True) or [""]
        except ValueError as error:
            raise ConfigError(f"cannot be read: {error}", where) from error
        name, _, hosts = told.partition("=")
        if not told:
            continue
        if not is_node_name(name):
            raise ConfigError(f"{name!r} cannot be a name: one has {NODE_NAME_RULE}", where)
        for option, value in zip_longest(words[::2], words[1::2]):
            if option not in options or value is None:
                allowed = f"after the name may stand {', '.join(options)}, each with a value" if options else "one name"
                raise ConfigError(f"{option!r} is not understood: {allowed}", where)
        if (before := found.get(name.casefold())) is not None:
            raise ConfigError(f"{name} stands there already, in {before.where}", where)
        found[name.casefold()] = ListedHost(where, name, tuple(filter(None, hosts.split(","))), shlex.join(words))
    return list(found.values())


async def invite_all(
    invite_one: Callable[[ListedHost], Awaitable[str]], hosts: Iterable[ListedHost], keep: Callable[[str], None]
) -> list[str]:
    """Keep a line `NAME headway join TOKEN …` of each as soon as it is invited: nobody gets a token twice.

    Returns why nobody may be invited by the other names.
    """
    refused = []
    for host in hosts:
        try:
            token = await invite_one(host)
        except ConfigError as error:
            refused.append(f"{host.where}: {error}")
            continue
        keep(f"{host.name} headway join {token} {host.options}".rstrip())
    return refused


def _check_members(members: Iterable[str], signers: Iterable[NodeRecord]) -> None:
    """Raise ConfigError when this machine dials etcd at an address that means another machine elsewhere."""
    ports = [port for node in signers for port in listening_ports(node.address)]
    if all(_is_loopback(port) for port in ports):
        return  # the whole cluster is on this machine
    for member in members:
        if _is_loopback(member):
            raise ConfigError(f"{member} is another machine there: name etcd's members with --etcd-there", "invite")


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address.removeprefix("https://").removeprefix("http://"), "etcd")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def finish(folder: Path) -> None:
    """Put the next key in its place, if its certificate is already in its own. Raises OSError, ConfigError."""
    certificate = read_certificate((folder / CERTIFICATE_FILE).read_bytes(), str(folder / CERTIFICATE_FILE))
    try:
        key = serialization.load_pem_private_key((folder / NEXT_KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        return  # no attempt has come so far
    if key.public_key() == certificate.public_key():
        (folder / NEXT_KEY).replace(folder / KEY_FILE)


async def renew(session: ClusterSession) -> str:
    """Replace this person's certificate in its folder; return a sentence. Raises ConfigError, PeerError, StoreError."""
    identity, folder = session.identity, session.address.certificates
    if identity is None or folder is None or session.address.state_dir is not None:
        raise ConfigError("names the folder with the certificate that is to be renewed", "--certs")
    where = folder / CERTIFICATE_FILE
    present = read_certificate(identity.certificate, str(where))
    borne = names_in(present)
    if roles_among(borne) == {Role.NODE}:
        raise ConfigError("is a node's: its daemon, or relay with --etcd, renews it by itself", str(where))
    name = next(iter(names_of(identity)), "")
    view = await session.view()
    try:
        key = next_key(folder, identity.key)
        pem = await asked_of_authority(view.nodes.values(), identity, signing_request(name, key))
        renewed = read_certificate(pem.encode(), "the authority's answer")
        if issuer_of(renewed, identity.ca) is None:
            raise ConfigError("is of an authority that is not in ca.pem: copy that one here first", "its answer")
        if renewed.public_key() != key.public_key() or set(names_in(renewed)) != set(borne):
            raise ConfigError("is not for this key, name and role", "the authority's answer")
        part = folder / f"{CERTIFICATE_FILE}.part"
        write_private(part, pem.encode())
        for path in (part, folder / NEXT_KEY):
            make_durable(path)
        part.replace(where)
        finish(folder)
    except ProtocolError as error:
        raise ConfigError(error.reason, str(where)) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", str(error.filename or folder)) from error
    return f"{where}: renewed, until {renewed.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
