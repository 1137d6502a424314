"""Commands by which machines and people get, renew and lose their certificates."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.daemon.base.terminal import table
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
    from headway.daemon.client.certificate_requests import KnownCertificate

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
    add(app, invite, join, panel=Panel.SET_UP)


def _certs() -> None:
    """Make certificates for nodes and people, list or revoke them. Without a command, `make` is meant.

    \b
    headway certs ca node-a=10.0.0.7 --operator me
    headway certs revoke node-b
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
    """For which people, and for how long."""

    operator: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    """Someone who runs jobs and nodes; may be repeated."""
    reader: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    """Someone who looks on; may be repeated."""
    days: Annotated[int | None, typer.Option(min=1, max=36500)] = None
    """Days for which a new authority and its certificates are valid; 3650 if not given."""


def make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder; keep it private.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME[=HOST,…]", help="Nodes and etcd members.")] = None,
    *,
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
    for role, told in ((Role.NODE, names), (Role.OPERATOR, options.operator), (Role.READER, options.reader)):
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


def list_known(where: Where, as_json: AsJson = False) -> Answer:
    """List known certificates.

    They are of nodes, of those who were invited, and of those who are revoked. What `headway certs` made for etcd and
    for people lies in their folders alone.

    \b
    headway certs list --json
    """
    from headway.daemon.client.certificate_requests import known_certificates

    found = where.run(known_certificates)
    if as_json:
        return as_json_text(found)
    sys.stderr.write(
        "not here: what `headway certs` made for etcd and people; `openssl x509 -dates -noout -in cert.pem` shows one\n"
    )
    return table(("NAME", "ROLE", "HERE", "SINCE", "UNTIL", "REVOKED"), [_row(one) for one in found])


def _row(one: "KnownCertificate") -> tuple[str, ...]:
    revoked = f"{_date(one.revoked_at)} by {one.revoked_by or 'somebody'}" if one.revoked_at else "-"
    since, until = (_date(at) if at else "-" for at in (one.issued_at, one.expires_at))
    return one.name, one.role or "-", "yes" if one.is_present else "-", since, until, revoked


def _date(at: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


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


def invite(
    name: Annotated[str, typer.Argument(metavar="NAME[=HOST,…]", help="Name of the node or person.")],
    options: InviteOptions,
    where: Where,
) -> Answer:
    """Print one line that a new machine runs to join the cluster. The line works once.

    A daemon with the setting `authority` signs. Whoever has the line may join under this name, so pass it on privately.

    \b
    headway invite node-b
    headway invite ann --role reader --lasts 1d
    """
    from headway.daemon.client import certificate_requests
    from headway.daemon.net.invitation import read_duration

    (own, _, hosts), role = name.partition("="), options.role
    lasts_s = read_duration(options.lasts, "--lasts")
    valid_s = read_duration(options.valid or ("30d" if role == "node" else "365d"), "--valid")
    token = where.run(
        lambda session: certificate_requests.invite(
            session,
            own,
            role=role,
            hosts=[host for host in hosts.split(",") if host],
            lasts_s=lasts_s,
            valid_s=valid_s,
            again=options.again,
            etcd=[member for member in (options.etcd_there or "").split(",") if member],
        )
    )
    sys.stderr.write(f"valid once, within {options.lasts}, for {role} {own}; run it there:\n")
    if role == "node":
        sys.stderr.write(
            "add there, if needed: --listen for another port than 7070, --announce HOST:PORT where a router or a cloud "
            "maps that port, --relay auto if nobody can dial the machine\n"
        )
    return f"headway join {token}"


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
