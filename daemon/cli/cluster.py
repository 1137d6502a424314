"""Commands about nodes and users, and commands that set up a machine."""

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.daemon.base.terminal import table
from headway.daemon.cli.options import (
    Answer,
    AsJson,
    Commands,
    EtcdBinary,
    Panel,
    Where,
    add,
    add_group,
    as_json_text,
    command_of,
    say,
    settings_options,
)
from headway.daemon.node.settings import NodeConfig

if TYPE_CHECKING:
    from headway.daemon.cli.install import Action

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
ConfigPath = Annotated[Path | None, typer.Option("--config", help="A node's settings in TOML.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]


def register(app: Commands) -> None:
    """Add the commands."""
    add(add_group(app, "nodes", nodes, panel=Panel.LOOK, is_command=True), release)
    add(app, web, panel=Panel.LOOK)
    add(app, drain, panel=Panel.CLUSTER)
    shares_app = add_group(app, "shares", shares, panel=Panel.CLUSTER, is_command=True)
    add(shares_app, set_share, name="set")
    add(shares_app, times)
    app.add("daemon", lambda: command_of("daemon", _daemon_with_options(), Panel.SET_UP))
    add(add_group(app, "config", _config, panel=Panel.SET_UP), config_show, name="show")
    add(app, install, uninstall, relay, doctor, panel=Panel.SET_UP)


def _daemon_with_options() -> Any:
    """Return the command with `--config`, and an option for each setting of a node."""

    def run(**told: Any) -> int:
        return daemon(told.pop("config"), told)

    run.__doc__ = daemon.__doc__
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigPath)
    options = [config, *settings_options(NodeConfig, certificates="--certs")]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


def daemon(config: Path | None, flags: dict[str, object]) -> int:
    """Run one node until SIGTERM; systemd starts this command.

    Settings come from --config, then HEADWAY_… variables, then these flags; later ones override earlier ones.


    headway daemon --etcd 10.0.0.5:2379 --certs certs --listen 0.0.0.0:7070 --advertise-host 10.0.0.7 --state-dir state

    """
    if sys.stderr.isatty():
        sys.stderr.write("headway: starting\n")  # a slow machine imports for many seconds
    from headway.daemon.node.config import LISTS, read_node_config
    from headway.daemon.node.lifecycle import run

    for key in LISTS:
        if isinstance(told := flags[key], str):
            flags[key] = tuple(told.split(","))
    return run(read_node_config(config, flags=flags)) or 0


def nodes(context: typer.Context, where: Where, as_json: AsJson = False) -> Answer:
    """List the nodes that are up, and the nodes in quarantine; `nodes release NODE` ends a quarantine.

    \b
    headway nodes --json
    """
    if context.invoked_subcommand is not None:
        return None
    from headway.daemon.base.terminal import screen_width
    from headway.daemon.reports.node_list import NO_NODE, node_lines, report_nodes, set_aside_lines

    view = where.view()
    if as_json:
        return as_json_text([report.as_dict() for report in report_nodes(view)])
    lines = node_lines(view, width=screen_width()) or [NO_NODE]
    return [*lines, *set_aside_lines(view)]


def release(node: NodeName, where: Where) -> Answer:
    """Forget a node's failures and its drain mark: plans may use the node again.

    \b
    headway nodes release node-2
    """
    from headway.daemon.client import node_requests

    return where.run(lambda session: node_requests.release(session, node))


def drain(node: NodeName, where: Where) -> Answer:
    """Move a node's layers elsewhere, without losing a batch.

    The node takes no work until `headway nodes release NODE`, or until its daemon is restarted.

    \b
    headway drain node-2
    """
    from headway.daemon.client import node_requests

    return where.run(lambda session: node_requests.drain(session, node))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """Where a relay listens, as whom, and how much it carries."""

    listen: str = "0.0.0.0:7070"
    """HOST:PORT to listen on."""
    certificates: Annotated[Path | None, typer.Option("--certificates", "--certs")] = None
    """Folder with ca.pem, cert.pem and key.pem (also HEADWAY_CERTS)."""
    etcd: str | None = None
    """HOST:PORT of each etcd member: the relay renews its certificate, and refuses revoked nodes."""
    most_streams: Annotated[int, typer.Option(min=0)] = 0
    """Maximum number of streams; 0: what files allow."""
    mbit_s: Annotated[float, typer.Option(min=0)] = 0.0
    """Maximum rate of all streams together; 0: no limit."""


def relay(options: RelayOptions) -> int:
    """Pass on what nodes that only dial out and their peers send each other: a small host without GPU or etcd.

    Nodes name it in --relay. It sees ciphertext only, and nodes of its authority alone may stand by. SIGTERM ends it.

    \b
    headway relay --certs relay --etcd 10.0.0.5:2379 --listen 0.0.0.0:7070
    """
    from headway.daemon.cluster.members import read_members
    from headway.daemon.node.config import CLIENT_CERTIFICATES
    from headway.daemon.node.relay_host import RelayConfig, run

    folder = options.certificates or Path(os.environ.get(CLIENT_CERTIFICATES) or "/etc/headway/certificates")
    members = read_members([options.etcd], "--etcd", has_certificates=True) if options.etcd else ()
    return run(RelayConfig(**asdict(options) | {"certificates": folder, "etcd": members}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What is checked."""

    source: Annotated[str | None, typer.Option("--from", metavar="NODE")] = None
    """Check only what this node's daemon reaches."""
    to: Annotated[list[str] | None, typer.Option(metavar="NODE")] = None
    """With --from: nodes to dial; all if not given. May be repeated."""


def doctor(etcd_binary: EtcdBinary = None, *, options: DoctorOptions, where: Where, as_json: AsJson = False) -> int:
    """Check this machine, and the cluster if one is named: show what is missing, and the remedy.

    Each daemon dials the others as their peers would, so that a closed port shows before a job meets it.
    With --from, one daemon proves from its side that others can be reached, a new machine for instance.

    \b
    headway doctor --etcd etcd.example:2379 --certs ~/headway-certs
    headway doctor --from gpu-1 --to node-b
    """
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.client.cluster_access import DEFAULT_CLUSTER_DIR
    from headway.daemon.client.doctor import examine, examine_from

    if options.to and options.source is None:
        raise ConfigError("needs --from: the node that dials", "--to")
    if options.source is not None:
        findings = examine_from(options.source, options.to or (), where.find)
    else:
        is_elsewhere = where.etcd or (where.cluster is None and os.environ.get("HEADWAY_ETCD"))
        named = where.cluster or os.environ.get("HEADWAY_CLUSTER") or DEFAULT_CLUSTER_DIR.exists()
        is_local = bool(named and not is_elsewhere)
        find = where.find if is_elsewhere or is_local or where.certs else None
        findings = examine(find, etcd_binary=etcd_binary, is_local=is_local)
    if as_json:
        say(as_json_text(findings))
    for finding in [] if as_json else findings:
        mark = "FAIL" if not finding.is_fine else "note" if finding.advice else "ok  "
        say(f"{mark}  {finding.what}: {finding.found}")
        if finding.advice:
            say(f"      {finding.advice}")
    return 0 if all(finding.is_fine for finding in findings) else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Where the pages are served."""

    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:8642"
    """Address to serve at; port 0 takes a free one. Other addresses than loopback are served with TLS."""
    tls_cert: Path | None = None
    """Certificate for browsers, in PEM; by default your own of --certs, about which they ask."""
    tls_key: Path | None = None
    """Its key."""


def web(options: WebOptions, where: Where) -> int:
    """Show the cluster and its jobs in a browser, until Ctrl-C. Its pages only read.

    Open the address that it prints: without the token in it nobody sees anything.

    \b
    headway web
    headway web --listen 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem
    """
    from headway.daemon.base.interrupts import run_interruptible
    from headway.stages.errors import check_installed

    check_installed("aiohttp", "web", "`headway web`")
    from headway.daemon.client.web import Listening, serve

    address = where.find()
    listening = Listening.read(options.listen, options.tls_cert, options.tls_key, address.certificates)
    seal = f"compare what the browser shows of its certificate: SHA-256 {listening.fingerprint}\n"
    end = f"{seal if listening.tls else ''}Ctrl-C ends it; jobs do not notice"
    main = serve(address, listening, on_ready=lambda url: say(f"{url}\n{end}"))
    return run_interruptible(lambda _: main, has_ended_well=lambda: True)


def _config() -> None:
    """A node's settings.

    \b
    headway config show
    """


def config_show(config: ConfigPath = None, as_json: AsJson = False) -> Answer:
    """Show the settings that `headway daemon` would use here, from file and environment.

    \b
    headway config show --config /etc/headway/daemon.toml
    """
    import dataclasses

    from headway.daemon.node.config import read_node_config

    settings = dataclasses.asdict(read_node_config(config))
    if as_json:
        return as_json_text({key: str(value) if isinstance(value, Path) else value for key, value in settings.items()})
    return [f"{key} = {_toml(value)}" for key, value in settings.items()]


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    return '""  # not set' if value is None else f'"{value}"'


def shares(context: typer.Context, where: Where, as_json: AsJson = False) -> Answer:
    """List users with their weight and their recent use; the user on the first line is served next.

    The leader records the use once a minute.

    \b
    headway shares --json
    """
    if context.invoked_subcommand is not None:
        return None
    from headway.daemon.client.node_requests import describe, report_shares

    view = where.view()
    users = report_shares(view)
    if as_json:
        return as_json_text({"users": users, "slice_s": view.shares.slice_s, "half_life_s": view.shares.half_life_s})
    rows = [
        (
            each.user or "(nobody)",
            f"{each.weight:g}",
            f"{each.share:.0%}".replace("%", " %") if each.share else "",
            f"{each.used / 3600:.2f}",
            str(each.num_devices),
            str(each.num_jobs),
        )
        for each in users
    ]
    titles = ("user", "weight", "share", "recent device-hours", "devices", "jobs")
    nobody = "no user has a job, a weight or recent use; every weight is 1 until `headway shares set` changes it"
    return [*(table(titles, rows) if rows else [nobody]), describe(view.shares)]


def set_share(
    user: Annotated[str, typer.Argument(metavar="USER", help="The user's name, as in `headway jobs`.")],
    weight: Annotated[float, typer.Argument(metavar="WEIGHT", help="The default is 1; weight 2 is twice the share.")],
    where: Where,
) -> Answer:
    """Give a user a larger or a smaller share.

    \b
    headway shares set alice 2
    """
    from headway.daemon.client import node_requests

    return where.run(lambda session: node_requests.set_share(session, user, weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a turn lasts, and how fast past use is forgotten."""

    slice_s: Annotated[float | None, typer.Option("--slice")] = None
    """Minimum time in seconds that a started job runs before another may stop it."""
    half_life_s: Annotated[float | None, typer.Option("--half-life")] = None
    """Half-life of past use, in seconds."""


def times(options: Times, where: Where) -> Answer:
    """Change the time slice of a started job and the half-life of past use. Without options, show both.

    \b
    headway shares times --slice 1200
    """
    from headway.daemon.client.node_requests import set_times

    return where.run(lambda session: set_times(session, **asdict(options)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOptions:
    """What the service runs with."""

    config: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None
    """The node's settings, for /etc/headway/daemon.toml."""
    certs: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None
    """Folder with the node's ca.pem, cert.pem and key.pem."""
    writable: list[Path] | None = None
    """A folder that the node may write, such as that of checkpoints; may be repeated."""
    cuda: Literal["auto", "yes", "no"] = "auto"
    """Let the service open NVIDIA's devices; auto: if there are."""
    start: bool = True
    """Start the service, once its settings are not the example."""


def install(options: InstallOptions, dry_run: DryRun = False) -> Iterator[str]:
    """Make the daemon of this machine a service of systemd; needs root. A second call writes only what has changed.

    \b
    headway install --config daemon.toml --certs ca/node-a --dry-run
    """
    from headway.daemon.cli.install import (
        SETTINGS,
        check_machine,
        install_actions,
        is_example,
        look,
        needs_restart,
        read_shipped,
        read_wish,
    )

    if not dry_run:
        check_machine()
    wish = read_wish(
        config=options.config,
        certificates=options.certs,
        writable=options.writable or [],
        cards=options.cuda,
        starts=options.start,
    )
    shipped, facts = read_shipped(), look()
    actions = install_actions(shipped, wish, facts)
    yield from _done(actions, dry_run, nothing="everything is in place")
    if is_example(shipped, wish, facts):
        yield f"{SETTINGS} is the example: edit it, then run `systemctl start headway`"
    if needs_restart(actions, facts):
        yield "the running daemon goes on as before until `systemctl restart headway`, which moves its work first"


def uninstall(
    purge: Annotated[
        bool, typer.Option("--purge", help="Also delete settings, keys, state and the user `headway`.")
    ] = False,
    dry_run: DryRun = False,
) -> Iterator[str]:
    """Remove the service; its node leaves the cluster without a lost batch. Settings and state stay.

    \b
    headway uninstall --dry-run
    """
    from headway.daemon.cli.install import check_machine, look, uninstall_actions

    if not dry_run:
        check_machine()
    yield from _done(uninstall_actions(look(), purge=purge), dry_run, nothing="no service is installed here")


def _done(actions: "tuple[Action, ...]", dry_run: bool, *, nothing: str) -> Iterator[str]:
    from headway.daemon.cli.install import act

    for action in actions:
        yield str(action)
        if not dry_run:
            act(action)
    if not actions:
        yield f"nothing to do: {nothing}"
