"""Commands about certificates: make them, list them, revoke them."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headway.daemon.cli.options import AsJson, Certs, Cluster, Etcd, say, say_json, say_table, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.certificate_requests import KnownCertificate
    from headway.daemon.client.cluster_access import ClusterSession
    from headway.daemon.rpc.certificates import CertificateAuthority

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Nodes and people.")]
REPLACED = "; the key and certificate that were there are replaced"


class _Certificates(TyperGroup):
    """`headway certs DIR NAME…` means `headway certs make DIR NAME…`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names; without one, it is a folder."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["make", *args])


def register(app: typer.Typer) -> None:
    """Add the commands."""
    certs_app = typer.Typer(no_args_is_help=True, cls=_Certificates)
    certs_app.callback()(_certs)
    certs_app.command("make")(make)
    certs_app.command()(rotate)
    certs_app.command()(renew)
    certs_app.command("list")(list_known)
    certs_app.command()(revoke)
    certs_app.command()(restore)
    app.add_typer(certs_app, name="certs")


def _certs() -> None:
    """Make certificates for nodes and people, list or revoke them. Without a command, `make` is meant.

    \b
    headway certs ca node-a=10.0.0.7 --operator me
    headway certs revoke node-b
    """


def make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder; keep it private.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME[=HOST,…]", help="Nodes and etcd members.")] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Someone who runs jobs and nodes; may be repeated.")
    ] = None,
    reader: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Someone who looks on; may be repeated.")
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=36500, help="Days for which a new authority and its certificates are valid; 3650 if not given."
        ),
    ] = None,
) -> None:
    """Make certificates, and their authority.

    Each name gets a folder with ca.pem, cert.pem and key.pem.
    Give each node and each etcd member its folder: a certificate bears the name, which is the --name of the daemon.
    A node's certificate runs no commands that change something: people have their own, as operators or readers.
    Called again, it adds names to the same authority.

    \b
    headway certs make ca etcd=10.0.0.5 node-a=10.0.0.7,a.example node-b --operator me --reader ann
    """
    from datetime import timedelta

    from headway.daemon.errors import ConfigError
    from headway.daemon.rpc.certificates import CA_KEY_FILE, KEPT_VALIDITY, CertificateAuthority
    from headway.stages.sockets.roles import Role
    from headway.stages.sockets.tls_identity import KEY_FILE

    if (directory / CA_KEY_FILE).exists():
        authority = CertificateAuthority.open(directory)
        if days is not None:
            what = "already has an authority, and its certificates are valid as long as the authority"
            raise ConfigError(f"{what}: leave --days out, or name a new folder", str(directory))
    else:
        authority = CertificateAuthority.create(directory, validity=timedelta(days=days) if days else KEPT_VALIDITY)
        say(f"{directory}: a new authority; anyone who has {CA_KEY_FILE} can join the cluster")
    holders = {Role.NODE: names, Role.OPERATOR: operator, Role.READER: reader}
    for role, told in ((role, told) for role, of_role in holders.items() for told in of_role or []):
        name, _, hosts = told.partition("=")
        was_there = (directory / name / KEY_FILE).exists()
        folder = authority.issue(name, hosts=tuple(host for host in hosts.split(",") if host), role=role)
        say(f"{folder}: for {role} {name}{REPLACED if was_there else ''}")


def rotate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder.")],
    sign: Annotated[bool, typer.Option("--sign", help="The second step: the new authority signs.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="The third step: the old authority is trusted no more.")] = False,
    unasked: Annotated[
        bool, typer.Option("--unasked", help="With --drop: do not ask the cluster for jobs that need the old one.")
    ] = False,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
) -> None:
    """Let another authority follow, in three steps: everybody trusts both, the new one signs, the old one goes.

    After the first and the third step, copy DIR/ca.pem to all machines. Nodes read it while they run.
    The third step asks the cluster, and is refused while a job goes on that the old authority's operators signed:
    `headway jobs sign` signs it again.

    \b
    headway certs rotate ca
    headway certs rotate ca --sign
    headway certs rotate ca --drop
    """
    from headway.daemon.errors import ConfigError
    from headway.daemon.rpc import authority_change
    from headway.stages.sockets.tls_identity import CA_FILE

    if sign and drop:
        raise ConfigError(
            "are two steps: --drop is for the time when nobody uses a certificate of the old one", "--sign"
        )
    if sign:
        authority_change.sign(directory)
        say(f"{directory}: the new authority signs; restart the daemons with this authority, one after the other")
        say("make again what `headway certs` has made, and copy it: of etcd, of nodes with the authority, of people")
        say("next: --drop, once `headway certs list` shows a certificate of today or later for all who were invited;")
        say("jobs that go on then need a signature of the new one: `headway jobs sign JOB…`")
        return
    if drop:
        authority = authority_change.before_drop(directory)
        if not unasked:
            _check_jobs(authority, etcd, certs, cluster)
        authority_change.drop(directory)
        say(f"{directory}: the old authority is trusted no more")
    else:
        authority_change.begin(directory)
        say(f"{directory}: a second authority, which does not sign yet")
    then = "" if drop else "; next: --sign"
    say(f"copy {directory / CA_FILE} to every node, relay and person, and to etcd, and restart etcd{then}")


def _check_jobs(authority: "CertificateAuthority", etcd: str | None, certs: Path | None, cluster: Path | None) -> None:
    """Raise ConfigError while jobs go on that need the old authority, and if the cluster cannot be asked."""
    from headway.daemon.client.job_requests import check_none_is_left
    from headway.daemon.errors import ConfigError, StoreUnreachableError
    from headway.daemon.rpc.certificates import certificate_pem

    async def work(session: "ClusterSession") -> None:
        await check_none_is_left(session, both=authority.trusted, alone=certificate_pem(authority.certificate))

    try:
        with_cluster(etcd, certs, cluster, work)
    except StoreUnreachableError as error:
        why = f"asks the cluster for jobs that need the old authority: {error}; --unasked drops it without asking"
        raise ConfigError(why, "--drop") from error


def renew(etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Renew the certificate of an invited person: another key, the same name and role.

    A daemon with the authority signs. Nodes, and relays with --etcd, renew theirs by themselves.

    \b
    headway certs renew --certs ann
    """
    from headway.daemon.client.certificate_requests import finish
    from headway.daemon.client.certificate_requests import renew as ask
    from headway.daemon.client.cluster_access import find_cluster

    address = find_cluster(etcd=etcd, certs=certs, cluster=cluster)
    if address.certificates is not None and address.state_dir is None:
        with suppress(OSError):  # what is missing is told when it is needed
            finish(address.certificates)
    say(with_cluster(etcd, certs, cluster, ask, warns_of_end=False))


def list_known(etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List known certificates.

    They are of nodes, of those who were invited, and of those who are revoked. What `headway certs` made for etcd and
    for people lies in their folders alone.

    \b
    headway certs list --json
    """
    from headway.daemon.client.certificate_requests import known_certificates

    found = with_cluster(etcd, certs, cluster, known_certificates)
    if as_json:
        say_json(found)
        return
    say_table(("NAME", "ROLE", "HERE", "SINCE", "UNTIL", "REVOKED"), [_row(one) for one in found])
    sys.stderr.write(
        "not here: what `headway certs` made for etcd and people; `openssl x509 -dates -noout -in cert.pem` shows one\n"
    )


def _row(one: "KnownCertificate") -> tuple[str, ...]:
    revoked = f"{_date(one.revoked_at)} by {one.revoked_by or 'somebody'}" if one.revoked_at else "-"
    since, until = (_date(at) if at else "-" for at in (one.issued_at, one.expires_at))
    return one.name, one.role or "-", "yes" if one.is_present else "-", since, until, revoked


def _date(at: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def revoke(names: Names, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Revoke certificates, by name.

    Within seconds all daemons refuse their holders, and jobs of a revoked node go on without it.
    etcd itself takes the certificate until its user is deleted, if etcd has users.

    \b
    headway certs revoke node-b
    """
    from headway.daemon.client.certificate_requests import in_etcd
    from headway.daemon.client.certificate_requests import revoke as ask

    async def work(session: "ClusterSession") -> list[str]:
        return [*await ask(session, names), await in_etcd(session, names)]

    for line in with_cluster(etcd, certs, cluster, work):
        say(line)


def restore(names: Names, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Let a revoked name's certificates count.

    \b
    headway certs restore node-b
    """
    from headway.daemon.client.certificate_requests import restore as ask

    async def work(session: "ClusterSession") -> list[str]:
        return await ask(session, names)

    for line in with_cluster(etcd, certs, cluster, work):
        say(line)
