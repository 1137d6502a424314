"""Commands by which machines and people get their certificates."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.daemon.cli.options import Certs, Cluster, Etcd, say, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (invite, join):
        app.command()(command)


def invite(
    name: Annotated[str, typer.Argument(metavar="NAME[=HOST,…]", help="Name of the node or person.")],
    role: Annotated[Literal["node", "operator", "reader"], typer.Option(help="What its certificate allows.")] = "node",
    lasts: Annotated[str, typer.Option(help="Time in which it has to join, such as 30m, 1h or 7d.")] = "1h",
    valid: Annotated[
        str | None,
        typer.Option(
            help="Life of its certificate; 30d for a node, which renews it, 365d for a person.", show_default=False
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Although the name has a certificate, which stays valid.")
    ] = False,
    etcd_there: Annotated[
        str | None,
        typer.Option(help="etcd members as the new machine dials them, if otherwise than here.", show_default=False),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
) -> None:
    """Print one line that a new machine runs to join the cluster. The line works once.

    A daemon with the setting `authority` signs. Whoever has the line may join under this name, so pass it on privately.

    \b
    headway invite node-b
    headway invite ann --role reader --lasts 1d
    """
    from headway.daemon.client.certificate_requests import invite as ask
    from headway.daemon.joining.invitation import read_duration

    own, _, hosts = name.partition("=")
    lasts_s = read_duration(lasts, "--lasts")
    valid_s = read_duration(valid or ("30d" if role == "node" else "365d"), "--valid")

    async def work(session: "ClusterSession") -> str:
        return await ask(
            session,
            own,
            role=role,
            hosts=[host for host in hosts.split(",") if host],
            lasts_s=lasts_s,
            valid_s=valid_s,
            again=again,
            etcd=[member for member in (etcd_there or "").split(",") if member],
        )

    token = with_cluster(etcd, certs, cluster, work)
    sys.stderr.write(f"valid once, within {lasts}, for {role} {own}; run it there:\n")
    if role == "node":
        sys.stderr.write(
            "add there, if needed: --listen for another port than 7070, --announce HOST:PORT where a router or a cloud "
            "maps that port, --relay auto if nobody can dial the machine\n"
        )
    say(f"headway join {token}")


def join(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="What `headway invite` has printed.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for key, certificate and settings; the name if not given.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="A node's HOST:PORT; 0.0.0.0:7070 if not given.")] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="Address that others dial; this machine's own towards the cluster if not given.")
    ] = None,
    announce: Annotated[
        str | None, typer.Option(help="HOST:PORT that others dial, if a router maps it to the one port.")
    ] = None,
    relay: Annotated[
        str | None, typer.Option(help="Relays, HOST:PORT,… or auto, if nobody can dial this machine.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Nodes of one site have a fast network between them.")] = None,
) -> None:
    """Join a cluster with the token of an invitation: make a key, get a certificate, write a node's settings.

    The key never leaves this machine, and the token's secret goes to the cluster's authority alone.

    \b
    headway join TOKEN --dir node-b
    """
    from headway.daemon.install.machine import service_command
    from headway.daemon.joining.join_client import join as ask
    from headway.daemon.joining.join_token import read_token
    from headway.daemon.joining.joined_folder import (
        JoinedFolder,
        identity_flags,
        relay_command,
        shell_settings,
        start_command,
    )
    from headway.daemon.node.config import read_node_config

    told = read_token(token)
    joined_folder = JoinedFolder(folder or Path(told.name), told)
    settings: dict[str, object] = {
        "listen": listen,
        "advertise_host": advertise_host,
        "announce": announce,
        "relay": relay,
        "site": site,
    }
    read_node_config(environment={}, flags=settings | {"one_port": True, "name": told.name})
    joined = ask(told, joined_folder.request)
    joined_folder.keep(joined, settings)
    where = joined_folder.folder
    say(f"{where}: {joined.answer.role} {told.name}")
    if joined.answer.role == "node":
        say(f"at once:      {start_command(where)}")
        if service := service_command(identity_flags(where)):
            say(f"as a service: {service}")
        say(f"as a relay:   {relay_command(where, joined)}{f' --listen {listen}' if listen else ''}")
    else:
        say(shell_settings(where, joined))
