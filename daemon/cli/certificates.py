"""Commands by which machines and people get, renew and lose their certificates."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.daemon.base.terminal import counted, table
from headway.daemon.cli.options import (
    Answer,
    AsJson,
    CommandGroup,
    Commands,
    Panel,
    Where,
    add,
    add_group,
    as_json_text,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headway.daemon.client.certificate_requests import KnownCertificate, ListedHost
    from headway.daemon.client.cluster_access import ClusterSession

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Nodes and people.")]
REPLACED = "; the key and certificate that were there are replaced"


class _Certificates(CommandGroup):
    """`headway certs DIR NAME…` means `headway certs make DIR NAME…`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names; without one, it is a folder."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["make", *args])


def register(app: Commands) -> None:
    """Add the commands."""
    group = add_group(app, "certs", _certs, panel=Panel.SET_UP, kind=_Certificates)
    add(group, make, rotate, renew)
    add(group, list_known, name="list")
    add(group, revoke, restore)
    add(group, etcd_users, name="etcd-users")
    add(app, invite, join, panel=Panel.SET_UP)


def _certs() -> None:
    """Make certificates for nodes and people, list or revoke them. Without a command, `make` is meant.

    \b
    headway certs ca node-a=10.0.0.7 --operator me
    headway certs revoke node-b
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """For which people."""

    operator: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    """Someone who runs jobs and nodes; may be repeated."""
    reader: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    """Someone who looks on; may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
    """For how long."""

    days: Annotated[int | None, typer.Option(min=1, max=36500)] = None
    """Days for which a new authority and its certificates are valid; 3650 if not given."""


def make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder; keep it private.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME[=HOST,…]", help="Nodes and etcd members.")] = None,
    *,
    people: People,
    options: MakeOptions,
) -> Iterator[str]:
    """Make certificates, and their authority.

    Each name gets a folder with ca.pem, cert.pem and key.pem.
    Give each node and each etcd member its folder: a certificate bears the name, which is the --name of the daemon.
    A node's certificate runs no commands that change something: people have their own, as operators or readers.
    Called again, it adds names to the same authority.

    \b
    headway certs make ca etcd=10.0.0.5 node-a=10.0.0.7,a.example node-b --operator me --reader ann
    """
    from datetime import timedelta

    from headway.daemon.base.errors import ConfigError
    from headway.daemon.net.certificates import CA_KEY_FILE, KEPT_VALIDITY, CertificateAuthority
    from headway.stages.sockets.roles import Role
    from headway.stages.sockets.tls_identity import KEY_FILE

    days = options.days
    if (directory / CA_KEY_FILE).exists():
        authority = CertificateAuthority.open(directory)
        if days is not None:
            what = "already has an authority, and its certificates are valid as long as the authority"
            raise ConfigError(f"{what}: leave --days out, or name a new folder", str(directory))
    else:
        authority = CertificateAuthority.create(directory, validity=timedelta(days=days) if days else KEPT_VALIDITY)
        yield f"{directory}: a new authority; anyone who has {CA_KEY_FILE} can join the cluster"
    for role, told in ((Role.NODE, names), (Role.OPERATOR, people.operator), (Role.READER, people.reader)):
        for each in told or ():
            name, _, hosts = each.partition("=")
            was_there = (directory / name / KEY_FILE).exists()
            folder = authority.issue(name, hosts=tuple(filter(None, hosts.split(","))), role=role)
            yield f"{folder}: for {role} {name}{REPLACED if was_there else ''}"


def rotate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder.")],
    sign: Annotated[bool, typer.Option("--sign", help="The second step: the new authority signs.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="The third step: the old authority is trusted no more.")] = False,
) -> Iterator[str]:
    """Let another authority follow, in three steps: everybody trusts both, the new one signs, the old one goes.

    After the first and the third step, copy DIR/ca.pem to all machines. Nodes read it while they run.

    \b
    headway certs rotate ca
    headway certs rotate ca --sign
    headway certs rotate ca --drop
    """
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.net import certificates
    from headway.stages.sockets.tls_identity import CA_FILE

    if sign and drop:
        raise ConfigError(
            "are two steps: --drop is for the time when nobody uses a certificate of the old one", "--sign"
        )
    if sign:
        certificates.sign_rotation(directory)
        yield f"{directory}: the new authority signs; restart the daemons with this authority, one after the other"
        yield "make again what `headway certs` has made, and copy it: of etcd, of nodes with the authority, of people"
        yield "next: --drop, once `headway certs list` shows a certificate of today or later for all who were invited"
        return
    if drop:
        certificates.drop_rotation(directory)
        yield f"{directory}: the old authority is trusted no more"
    else:
        certificates.begin_rotation(directory)
        yield f"{directory}: a second authority, which does not sign yet"
    then = "" if drop else "; next: --sign"
    yield f"copy {directory / CA_FILE} to every node, relay and person, and to etcd, and restart etcd{then}"


def renew(where: Where) -> Answer:
    """Renew the certificate of an invited person: another key, the same name and role.

    A daemon with the authority signs. Nodes, and relays with --etcd, renew theirs by themselves.

    \b
    headway certs renew --certs ann
    """
    from headway.daemon.client.certificate_requests import finish
    from headway.daemon.client.certificate_requests import renew as ask

    address = where.find()
    if address.certificates is not None and address.state_dir is None:
        with suppress(OSError):  # what is missing is told when it is needed
            finish(address.certificates)
    return where.run(ask, warns_of_end=False)


def list_known(
    where: Where,
    ca: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also what `headway certs` has made in this authority's folder.")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """List known certificates.

    They are of nodes, of those who were invited, and of those who are revoked. What `headway certs` made for etcd and
    for operators lies in the authority's folder alone.

    \b
    headway certs list --ca ca
    """
    from headway.daemon.client.certificate_requests import known_certificates, made_certificates

    made = made_certificates(ca) if ca is not None else []
    found = where.run(lambda session: known_certificates(session, made))
    if as_json:
        return as_json_text(found)
    if ca is None:
        sys.stderr.write("not here: what `headway certs` made for etcd and people; --ca DIR, its folder, adds them\n")
    return table(("NAME", "ROLE", "HERE", "SINCE", "UNTIL", "REVOKED"), [_row(one) for one in found])


def _row(one: "KnownCertificate") -> tuple[str, ...]:
    revoked = f"{_date(one.revoked_at)} by {one.revoked_by or 'somebody'}" if one.revoked_at else "-"
    since, until = (_date(at) if at else "-" for at in (one.issued_at, one.expires_at))
    return one.name, one.role or "-", "yes" if one.is_present else "-", since, until, revoked


def _date(at: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def etcd_users(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Nodes.")] = None,
    *,
    people: People,
    where: Where,
) -> Answer:
    """Print the etcdctl commands that give etcd users of its own: then etcd itself refuses what a role may not write.

    The first time for all nodes and people whom the cluster knows, and for those who are named. Later name those who
    are new, each machine before it joins. A node with the authority is an --operator here: it writes invitations.
    The commands need the certificate of `root`.

    \b
    headway certs etcd-users --operator me --operator node-a | sh -ex
    headway certs etcd-users node-b node-c --reader ann | sh -ex
    """
    from headway.daemon.base.addresses import NODE_NAME_RULE, is_node_name
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.client.certificate_requests import etcd_users as ask
    from headway.stages.sockets.roles import Role

    told = ((Role.NODE, names), (Role.OPERATOR, people.operator), (Role.READER, people.reader))
    users = {name: role for role, listed in told for name in listed or ()}
    for name in users:
        if not is_node_name(name):
            raise ConfigError(f"{name!r} cannot be the name of a certificate: one has {NODE_NAME_RULE}", "NAME")
    return where.run(lambda session: ask(session, users))


def revoke(names: Names, where: Where) -> Answer:
    """Revoke certificates, by name.

    Within seconds all daemons refuse their holders, and jobs of a revoked node go on without it.
    etcd itself takes the certificate until its user is deleted, if etcd has users.

    \b
    headway certs revoke node-b
    """
    from headway.daemon.client.certificate_requests import revoke as ask

    return where.run(lambda session: ask(session, names))


def restore(names: Names, where: Where) -> Answer:
    """Let a revoked name's certificates count.

    \b
    headway certs restore node-b
    """
    from headway.daemon.client.certificate_requests import restore as ask

    return where.run(lambda session: ask(session, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteOptions:
    """Who may join, until when, and with what."""

    role: Literal["node", "operator", "reader"] = "node"
    """What its certificate allows."""
    lasts: str = "1h"
    """Time in which it has to join, such as 30m, 1h or 7d."""
    valid: str | None = None
    """Life of its certificate; 30d for a node, which renews it, 365d for a person."""
    again: bool = False
    """Although the name has a certificate, which stays valid."""
    etcd_there: str | None = None
    """etcd members as the new machine dials them, if otherwise than here."""
    listed: Annotated[Path | None, typer.Option("--from", metavar="FILE")] = None
    """A list of names, one a line."""
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """With --from: file for the commands, which nobody else may read; stdout if not given."""


def invite(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME[=HOST,…]", help="Name of the node or person; or give --from.")
    ] = None,
    *,
    options: InviteOptions,
    where: Where,
) -> Answer:
    """Print one line that a new machine runs to join the cluster. The line works once.

    A daemon with the setting `authority` signs. Whoever has the line may join under this name, so pass it on privately.
    A list has a line for each machine: its name as here, and options of its `headway join`, such as --site.

    \b
    headway invite node-b
    headway invite ann --role reader --lasts 1d
    headway invite --from hosts.txt --out commands.txt
    """
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.client import certificate_requests
    from headway.daemon.client.certificate_requests import ListedHost
    from headway.daemon.net.invitation import read_duration

    role, listed = options.role, options.listed
    if (name is None) == (listed is None):
        raise ConfigError("give one name, or a list of them with --from", "NAME")
    lasts_s = read_duration(options.lasts, "--lasts")
    valid_s = read_duration(options.valid or ("30d" if role == "node" else "365d"), "--valid")

    async def ask(session: "ClusterSession", host: ListedHost) -> str:
        return await certificate_requests.invite(
            session,
            host.name,
            role=role,
            hosts=host.hosts,
            lasts_s=lasts_s,
            valid_s=valid_s,
            again=options.again,
            etcd=[member for member in (options.etcd_there or "").split(",") if member],
        )

    if listed is not None:
        return _invite_listed(listed, options, where, ask)
    own, _, hosts = (name or "").partition("=")
    one = ListedHost("NAME", own, tuple(filter(None, hosts.split(","))), "")
    token = where.run(lambda session: ask(session, one))
    sys.stderr.write(f"valid once, within {options.lasts}, for {role} {own}; run it there:\n")
    if role == "node":
        sys.stderr.write(
            "add there, if needed: --listen for another port than 7070, --announce HOST:PORT where a router or a cloud "
            "maps that port, --relay auto if nobody can dial the machine\n"
        )
    return f"headway join {token}"


def _invite_listed(
    path: Path,
    options: InviteOptions,
    where: Where,
    ask: "Callable[[ClusterSession, ListedHost], Awaitable[str]]",
) -> Answer:
    """Invite each line of a list. Raises ConfigError once the commands of the others are written, if some cannot be."""
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.client.certificate_requests import invite_all, read_list

    allowed = [f"--{each.name.replace('_', '-')}" for each in fields(JoinSettings)] if options.role == "node" else []
    hosts, out, num_kept = read_list(path, options=allowed), options.out, 0
    if out is not None and out.exists():
        raise ConfigError("is there already, perhaps with commands that still work: name another file", str(out))

    def keep(line: str) -> None:
        nonlocal num_kept
        num_kept += 1
        print(line, file=stream, flush=True)

    refused: list[str] = []
    with ExitStack() as stack:
        try:
            stream = sys.stdout if out is None else stack.enter_context(open(out, "x", opener=_private))
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", str(out)) from error
        try:
            refused = where.run(lambda session: invite_all(lambda host: ask(session, host), hosts, keep))
        finally:
            place = f"in {out}, each after its name" if out is not None else "on stdout"
            kept = counted(num_kept, "command")
            told = "" if num_kept + len(refused) == len(hosts) else f"; the list goes on after {kept}"
            sys.stderr.write(f"{kept} {place}; each is valid once, within {options.lasts}{told}\n")
            if out is not None and not num_kept:
                out.unlink()
    sys.stderr.write("".join(f"{line}\n" for line in refused))
    if refused:
        what = f"{len(refused)} of {len(hosts)} lines have no command: mend them in a list of their own"
        raise ConfigError(what, str(path))
    return None


def _private(path: str, flags: int) -> int:
    """Open a new file that no other user may read."""
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """A node's settings that depend on its network."""

    listen: str | None = None
    """A node's HOST:PORT; 0.0.0.0:7070 if not given."""
    advertise_host: str | None = None
    """Address that others dial; this machine's own towards the cluster if not given."""
    announce: str | None = None
    """HOST:PORT that others dial, if a router maps it to the one port."""
    relay: str | None = None
    """Relays, HOST:PORT,… or auto, if nobody can dial this machine."""
    site: str | None = None
    """Nodes of one site have a fast network between them."""


def join(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="What `headway invite` has printed.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for key, certificate and settings; the name if not given.")
    ] = None,
    *,
    options: JoinSettings,
) -> Iterator[str]:
    """Join a cluster with the token of an invitation: make a key, get a certificate, write a node's settings.

    The key never leaves this machine, and the token's secret goes to the cluster's authority alone.

    \b
    headway join TOKEN --dir node-b
    """
    from headway.daemon.cli.install import service_command
    from headway.daemon.net.join_client import (
        JoinedFolder,
        identity_flags,
        relay_command,
        shell_settings,
        start_command,
    )
    from headway.daemon.net.join_client import join as ask
    from headway.daemon.net.join_token import read_token
    from headway.daemon.node.config import read_node_config

    told = read_token(token)
    joined_folder = JoinedFolder(folder or Path(told.name), told)
    settings: dict[str, object] = asdict(options)
    read_node_config(environment={}, flags=settings | {"one_port": True, "name": told.name})
    joined = ask(told, joined_folder.request)
    joined_folder.keep(joined, settings)
    where = joined_folder.folder
    yield f"{where}: {joined.answer.role} {told.name}"
    if joined.answer.role == "node":
        yield f"at once:      {start_command(where)}"
        if service := service_command(identity_flags(where)):
            yield f"as a service: {service}"
        yield f"as a relay:   {relay_command(where, joined)}{f' --listen {options.listen}' if options.listen else ''}"
    else:
        yield shell_settings(where, joined)
