"""Commands about nodes, and commands that set up a machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.daemon.cli.options import AsJson, Certs, Cluster, Etcd, EtcdBinary, say, say_json, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
ConfigPath = Annotated[Path | None, typer.Option("--config", help="A node's settings in TOML.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (daemon, relay, drain, doctor):
        app.command()(command)
    nodes_app = typer.Typer(invoke_without_command=True)
    nodes_app.callback()(nodes)
    nodes_app.command("release")(release)
    app.add_typer(nodes_app, name="nodes")
    config_app = typer.Typer(no_args_is_help=True)
    config_app.callback()(_config)
    config_app.command("show")(config_show)
    app.add_typer(config_app, name="config")


def daemon(
    config: ConfigPath = None,
    name: Annotated[str | None, typer.Option(help="The node's name; the host's when not given.")] = None,
    etcd: Annotated[str | None, typer.Option(help="HOST:PORT of each etcd member, separated by commas.")] = None,
    etcd_user: Annotated[str | None, typer.Option(help="User of an etcd with passwords.")] = None,
    etcd_password_file: Annotated[Path | None, typer.Option(help="File with that user's password.")] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            "--certificates", "--certs", help="Folder with ca.pem, cert.pem and key.pem (also HEADWAY_CERTS)."
        ),
    ] = None,
    authority: Annotated[
        Path | None, typer.Option(help="Folder of the cluster's authority: this daemon answers `headway invite`.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free port.")] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="Name or address at which other machines dial this one.")
    ] = None,
    one_port: Annotated[
        bool | None, typer.Option(help="Workers are dialled through the port of --listen too: a node needs one open.")
    ] = None,
    announce: Annotated[
        str | None, typer.Option(help="HOST:PORT that others dial, if a router maps it to the one port.")
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of each relay through which others reach this node, which only dials; or auto."),
    ] = None,
    worker_ports: Annotated[
        str | None, typer.Option(help="Ports where workers listen, such as 7100-7107; free ports when not given.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(help="Nodes of one site have a fast network between them, and stay neighbours in the pipeline."),
    ] = None,
    site_is_private: Annotated[
        bool | None,
        typer.Option(
            help="Nobody else is on the site's network: there large tensors between CPU workers are not encrypted, "
            'unless the job says link = "grpc".'
        ),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder of the state that survives a restart.")] = None,
    store_dir: Annotated[Path | None, typer.Option(help="Folder of layer files; in memory when not given.")] = None,
    store_quota_bytes: Annotated[
        int | None, typer.Option(help="Maximum size of the store; 0: the size of the file system.")
    ] = None,
    transfer_mbit_s: Annotated[
        float | None, typer.Option(help="Maximum network rate of copies, checkpoints and exports; 0: no limit.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of token shards.")] = None,
    history_dir: Annotated[
        Path | None, typer.Option(help="Folder in which to record the history, for `headway chaos`.")
    ] = None,
    allowed_places: Annotated[
        str | None,
        typer.Option(help="Paths and URLs, separated by commas, below which all that a job names has to lie."),
    ] = None,
    checkpoint_root: Annotated[Path | None, typer.Option(help="Root of a relative checkpoint_dir.")] = None,
    devices: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Device type on which workers compute.")
    ] = None,
    num_devices: Annotated[int | None, typer.Option(help="Number of workers on this node; 0: one per device.")] = None,
    card_sharers: Annotated[
        int | None, typer.Option(help="Number of daemons on this machine that share each of its cards.")
    ] = None,
    cuda_reserve_gib: Annotated[
        float | None, typer.Option(help="Memory of each CUDA device that plans leave free, GiB.")
    ] = None,
    num_spares: Annotated[int | None, typer.Option(help="Number of spare worker processes.")] = None,
    lease_ttl_s: Annotated[
        int | None, typer.Option(help="Seconds of silence after which the node counts as dead.")
    ] = None,
    quarantine_after: Annotated[
        int | None, typer.Option(help="Number of failures after which plans leave a node out; 0: never.")
    ] = None,
    ended_jobs_kept: Annotated[
        int | None, typer.Option(help="Number of ended jobs that are kept; older ones are retired.")
    ] = None,
    ended_jobs_kept_days: Annotated[
        float | None, typer.Option(help="Days after its end at which a job is retired; 0: its age does not matter.")
    ] = None,
    stop_timeout_s: Annotated[float | None, typer.Option(help="Maximum wait for the stop boundary.")] = None,
    preemption: Annotated[
        Literal["none", "aws", "gcp", "azure"] | None,
        typer.Option(help="Leave when this cloud announces that it takes the spot machine away."),
    ] = None,
    preemption_server: Annotated[
        str | None, typer.Option(help="HOST:PORT of the metadata server; the cloud's own when not given.")
    ] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus; off when not given.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="Minimum level.")
    ] = None,
    log_format: Annotated[Literal["auto", "json", "console"] | None, typer.Option(help="auto: JSON in a pipe.")] = None,
) -> int:
    """Run one node until SIGTERM; systemd starts this command.

    Settings come from --config, then HEADWAY_… variables, then these flags; later ones override earlier ones.


    headway daemon --etcd 10.0.0.5:2379 --certs certs --listen 0.0.0.0:7070 --advertise-host 10.0.0.7 --state-dir state

    """
    flags: dict[str, object] = dict(locals())
    path = flags.pop("config")
    if sys.stderr.isatty():
        sys.stderr.write("headway: starting\n")  # a slow machine imports for many seconds
    from headway.daemon.node.config import LISTS, read_node_config
    from headway.daemon.node.lifecycle import run

    for key in LISTS:
        if isinstance(told := flags[key], str):
            flags[key] = tuple(told.split(","))
    assert path is None or isinstance(path, Path)
    return run(read_node_config(path, flags=flags)) or 0


def nodes(
    context: typer.Context, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """List the nodes that are up, and the nodes in quarantine; `nodes release NODE` ends a quarantine.

    \b
    headway nodes --json
    """
    if context.invoked_subcommand is not None:
        return
    from headway.daemon.reports.node_list import node_lines, report_nodes
    from headway.daemon.reports.set_aside import set_aside_lines
    from headway.daemon.terminal import screen_width

    async def work(session: "ClusterSession") -> None:
        view = await session.view()
        if as_json:
            say_json(report_nodes(view))
            return
        lines = node_lines(view, width=screen_width()) or ["no node is up; start one with `headway daemon`"]
        for line in [*lines, *set_aside_lines(view)]:
            say(line)

    with_cluster(etcd, certs, cluster, work)


def release(node: NodeName, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Forget a node's failures and its drain mark: plans may use the node again.

    \b
    headway nodes release node-2
    """
    from headway.daemon.client.node_requests import release as release_node

    async def work(session: "ClusterSession") -> None:
        say(await release_node(session, node))

    with_cluster(etcd, certs, cluster, work)


def drain(node: NodeName, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Move a node's layers elsewhere, without losing a batch.

    The node takes no work until `headway nodes release NODE`, or until its daemon is restarted.

    \b
    headway drain node-2
    """
    from headway.daemon.client.node_requests import drain as drain_node

    async def work(session: "ClusterSession") -> None:
        say(await drain_node(session, node))

    with_cluster(etcd, certs, cluster, work)


def relay(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "0.0.0.0:7070",
    certificates: Annotated[
        Path | None,
        typer.Option(
            "--certificates", "--certs", help="Folder with ca.pem, cert.pem and key.pem (also HEADWAY_CERTS)."
        ),
    ] = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of each etcd member: the relay renews its certificate, and refuses revoked nodes.",
            show_default=False,
        ),
    ] = None,
    most_streams: Annotated[int, typer.Option(min=0, help="Maximum number of streams; 0: what files allow.")] = 0,
    mbit_s: Annotated[float, typer.Option(min=0, help="Maximum rate of all streams together; 0: no limit.")] = 0.0,
) -> int:
    """Pass on what nodes that only dial out and their peers send each other: a small host without GPU or etcd.

    Nodes name it in --relay. It sees ciphertext only, and nodes of its authority alone may stand by. SIGTERM ends it.

    \b
    headway relay --certs relay --etcd 10.0.0.5:2379 --listen 0.0.0.0:7070
    """
    import os

    from headway.daemon.etcd.members import read_members
    from headway.daemon.node.config import CLIENT_CERTIFICATES
    from headway.daemon.node.relay_host import RelayConfig, run

    folder = certificates or Path(os.environ.get(CLIENT_CERTIFICATES) or "/etc/headway/certificates")
    members = read_members([etcd], "--etcd", has_certificates=True) if etcd else ()
    config = RelayConfig(listen=listen, certificates=folder, etcd=members, most_streams=most_streams, mbit_s=mbit_s)
    return run(config)


def doctor(
    etcd_binary: EtcdBinary = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NODE", help="Check only what this node's daemon reaches.", show_default=False),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="With --from: nodes to dial; all if not given. May be repeated."),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, and the cluster if one is named: show what is missing, and the remedy.

    Each daemon dials the others as their peers would, so that a closed port shows before a job meets it.
    With --from, one daemon proves from its side that others can be reached, a new machine for instance.

    \b
    headway doctor --etcd etcd.example:2379 --certs ~/headway-certs
    headway doctor --from gpu-1 --to node-b
    """
    from headway.daemon.doctor.examination import examine, examine_from
    from headway.daemon.errors import ConfigError

    if to and source is None:
        raise ConfigError("needs --from: the node that dials", "--to")
    if source is not None:
        findings = examine_from(source, to or (), etcd=etcd, certs=certs, cluster=cluster)
    else:
        findings = examine(etcd_binary=etcd_binary, etcd=etcd, certs=certs, cluster=cluster)
    if as_json:
        say_json(findings)
    else:
        for finding in findings:
            mark = "FAIL" if not finding.is_fine else "note" if finding.advice else "ok  "
            say(f"{mark}  {finding.what}: {finding.found}")
            if finding.advice:
                say(f"      {finding.advice}")
    return 0 if all(finding.is_fine for finding in findings) else 2


def _config() -> None:
    """A node's settings.

    \b
    headway config show
    """


def config_show(config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Show the settings that `headway daemon` would use here, from file and environment.

    \b
    headway config show --config /etc/headway/daemon.toml
    """
    import dataclasses

    from headway.daemon.node.config import read_node_config

    settings = dataclasses.asdict(read_node_config(config))
    if as_json:
        say_json({key: str(value) if isinstance(value, Path) else value for key, value in settings.items()})
        return
    for key, value in settings.items():
        say(f"{key} = {_toml(value)}")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    return '""  # not set' if value is None else f'"{value}"'
