"""Commands about how users share the cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.cli.options import AsJson, Certs, Cluster, Etcd, say, say_json, say_table, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession


def register(app: typer.Typer) -> None:
    """Add the commands."""
    shares_app = typer.Typer(invoke_without_command=True)
    shares_app.callback()(shares)
    shares_app.command("set")(set_share)
    shares_app.command("times")(times)
    app.add_typer(shares_app, name="shares")


def shares(
    context: typer.Context, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """List users with their weight and their recent use; the user on the first line is served next.

    The leader records the use once a minute.

    \b
    headway shares --json
    """
    if context.invoked_subcommand is not None:
        return
    from headway.daemon.client.node_requests import describe, report_shares

    async def work(session: "ClusterSession") -> None:
        view = await session.view()
        lines = report_shares(view)
        if as_json:
            say_json({"users": lines, "slice_s": view.shares.slice_s, "half_life_s": view.shares.half_life_s})
            return
        rows = [
            (
                line.user or "(nobody)",
                f"{line.weight:g}",
                f"{line.share:.0%}".replace("%", " %") if line.share else "",
                f"{line.used / 3600:.2f}",
                str(line.num_devices),
                str(line.num_jobs),
            )
            for line in lines
        ]
        if rows:
            say_table(("user", "weight", "share", "recent device-hours", "devices", "jobs"), rows)
        else:
            say("no user has a job, a weight or recent use; every weight is 1 until `headway shares set` changes it")
        say(describe(view.shares))

    with_cluster(etcd, certs, cluster, work)


def set_share(
    user: Annotated[str, typer.Argument(metavar="USER", help="The user's name, as in `headway jobs`.")],
    weight: Annotated[float, typer.Argument(metavar="WEIGHT", help="The default is 1; weight 2 is twice the share.")],
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
) -> None:
    """Give a user a larger or a smaller share.

    \b
    headway shares set alice 2
    """
    from headway.daemon.client.node_requests import set_share as write_share

    async def work(session: "ClusterSession") -> None:
        say(await write_share(session, user, weight))

    with_cluster(etcd, certs, cluster, work)


def times(
    time_slice: Annotated[
        float | None,
        typer.Option(
            "--slice",
            help="Minimum time in seconds that a started job runs before another may stop it.",
            show_default=False,
        ),
    ] = None,
    half_life: Annotated[
        float | None,
        typer.Option("--half-life", help="Half-life of past use, in seconds.", show_default=False),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
) -> None:
    """Change the time slice of a started job and the half-life of past use. Without options, show both.

    \b
    headway shares times --slice 1200
    """
    from headway.daemon.client.node_requests import set_times

    async def work(session: "ClusterSession") -> None:
        say(await set_times(session, slice_s=time_slice, half_life_s=half_life))

    with_cluster(etcd, certs, cluster, work)
