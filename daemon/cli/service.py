"""Commands that make the daemon a service of systemd."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.daemon.cli.options import say

if TYPE_CHECKING:
    from headway.daemon.install.actions import Action

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (install, uninstall):
        app.command()(command)


def install(
    config: Annotated[
        Path | None,
        typer.Option(
            help="The node's settings, for /etc/headway/daemon.toml.", exists=True, dir_okay=False, show_default=False
        ),
    ] = None,
    certs: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the node's ca.pem, cert.pem and key.pem.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    writable: Annotated[
        list[Path] | None,
        typer.Option(help="A folder that the node may write, such as that of checkpoints; may be repeated."),
    ] = None,
    cuda: Annotated[
        Literal["auto", "yes", "no"],
        typer.Option(help="Let the service open NVIDIA's devices; auto: if there are."),
    ] = "auto",
    start: Annotated[bool, typer.Option(help="Start the service, once its settings are not the example.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Make the daemon of this machine a service of systemd; needs root. A second call writes only what has changed.

    \b
    headway install --config daemon.toml --certs ca/node-a --dry-run
    """
    from headway.daemon.install.actions import SETTINGS, install_actions, is_example, needs_restart
    from headway.daemon.install.machine import check_machine, look, read_shipped, read_wish

    if not dry_run:
        check_machine()
    wish = read_wish(config=config, certificates=certs, writable=writable or [], cards=cuda, starts=start)
    shipped, facts = read_shipped(), look()
    actions = install_actions(shipped, wish, facts)
    _do(actions, dry_run, nothing="everything is in place")
    if is_example(shipped, wish, facts):
        say(f"{SETTINGS} is the example: edit it, then run `systemctl start headway`")
    if needs_restart(actions, facts):
        say("the running daemon goes on as before until `systemctl restart headway`, which moves its work first")


def uninstall(
    purge: Annotated[
        bool, typer.Option("--purge", help="Also delete settings, keys, state and the user `headway`.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove the service; its node leaves the cluster without a lost batch. Settings and state stay.

    \b
    headway uninstall --dry-run
    """
    from headway.daemon.install.actions import uninstall_actions
    from headway.daemon.install.machine import check_machine, look

    if not dry_run:
        check_machine()
    _do(uninstall_actions(look(), purge=purge), dry_run, nothing="no service is installed here")


def _do(actions: "tuple[Action, ...]", dry_run: bool, *, nothing: str) -> None:
    from headway.daemon.install.machine import act

    for action in actions:
        say(str(action))
        if not dry_run:
            act(action)
    if not actions:
        say(f"nothing to do: {nothing}")
