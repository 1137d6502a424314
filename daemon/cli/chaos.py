"""`headway chaos`: injects faults into a cluster, and checks whether it recovers."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.base.terminal import table
from headway.daemon.cli.options import AsJson, Commands, Panel, Where, add, as_json_text, say
from headway.daemon.local.fault_schedule import (
    DEFAULT_KINDS,
    FaultKind,
    fault_schedule,
    parse_duration,
    parse_kinds,
    parse_rate,
)

if TYPE_CHECKING:
    import asyncio

    from headway.daemon.local.campaign import Watcher
    from headway.daemon.local.fault_schedule import Blow
    from headway.daemon.local.injector import Injector

EXIT_NOT_HELD = 4


def register(app: Commands) -> None:
    """Add the command."""
    add(app, chaos, panel=Panel.CLUSTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Which faults strike, when and where."""

    faults: Annotated[str, typer.Option(help=f"Of {', '.join(FaultKind)}.")] = ",".join(DEFAULT_KINDS)
    """The kinds of faults, separated by commas."""
    rate: str = "6/min"
    """Average rate of faults, for instance 6/min."""
    for_: Annotated[str, typer.Option("--for")] = "2m"
    """Duration of the run, for instance 90s or 2m."""
    seed: int = 0
    """Seed of the schedule: the same seed and options give the same faults."""
    nodes: str = ""
    """Only these nodes, separated by commas."""
    longest: str = "8s"
    """Maximum duration of a pause or a slow phase."""
    yes: bool = False
    """Inject faults into a cluster on other machines without confirmation."""


def chaos(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job; not needed when one is active.")] = None,
    options: ChaosOptions = ChaosOptions(),
    *,
    where: Where,
    as_json: AsJson = False,
) -> int:
    """Strike at a running job, reproducibly, and say whether it recovers: exit code 0, or 4.

    Every fault works on a cluster of `headway up`. On any other cluster, only faults that need nothing but etcd work:
    lease-loss, leader-loss, drain. Ctrl-C resumes every process that was stopped.

    \b
    headway chaos --faults kill,pause,corrupt --rate 6/min --for 2m --seed 1
    """
    from headway.daemon.base.interrupts import run_interruptible

    kinds, duration_s, seed = parse_kinds(options.faults), parse_duration(options.for_), options.seed
    strikes = fault_schedule(
        seed=seed,
        kinds=kinds,
        rate_per_minute=parse_rate(options.rate),
        duration_s=duration_s,
        longest_s=parse_duration(options.longest),
    )
    address = where.find()
    if address.state_dir is None and not options.yes:
        typer.confirm(f"inject {len(strikes)} faults into the cluster of etcd {', '.join(address.etcd)}?", abort=True)
    only = tuple(filter(None, (name.strip() for name in options.nodes.split(","))))

    async def main(_force: "asyncio.Event") -> int:
        import asyncio

        from headway.daemon.client.cluster_access import ClusterSession
        from headway.daemon.client.job_requests import node_of
        from headway.daemon.local.campaign import Campaign, choose_job
        from headway.daemon.local.injector import Injector, LocalTargets

        targets = LocalTargets.of(address.state_dir) if address.state_dir is not None else None
        async with ClusterSession(address) as session:
            view = await session.view()
            name = choose_job(view, job)
            for node in only:
                node_of(view, node)
            async with Injector(session, targets=targets, job=name, nodes=only) as injector:
                injector.refuse(kinds)
                if not as_json:
                    say(f"seed {seed}: {len(strikes)} faults within {duration_s:g} s, on job {name}")
                tell = (lambda *_: None) if as_json else _tell
                campaign = Campaign(session, injector, job=name, strikes=strikes, tell=tell)
                drawing = asyncio.create_task(_draw(injector, duration_s, is_shown=not as_json))
                try:
                    watcher = await campaign.run()
                finally:
                    drawing.cancel()
                    await asyncio.wait({drawing})
        return _judged(name, watcher, seed=seed, as_json=as_json)

    return run_interruptible(main, on_first="resuming stopped processes")


def _judged(job: str, watcher: "Watcher", *, seed: int, as_json: bool) -> int:
    """Print the faults and the verdict; return the exit code."""
    reasons = watcher.failures
    if as_json:
        said = {"seed": seed, "job": job, "passed": not reasons, "reasons": reasons, "faults": watcher.blows}
        say(as_json_text(said))
        return EXIT_NOT_HELD if reasons else 0
    rows = [
        (
            str(blow.number),
            blow.kind,
            blow.target,
            f"{blow.at_s:.1f} s",
            "no" if blow.recovery_s is None else f"{blow.recovery_s:.2f} s",
            "same" if blow.new_generation is None else str(blow.new_generation),
            str(blow.recomputed),
        )
        for blow in watcher.blows
    ]
    titles = ("no", "fault", "target", "at", "recovered", "generation", "recomputed")
    verdict = "NOT HELD" if reasons else f"held: the job is {watcher.phase}"
    say("\n".join(["", *table(titles, rows), "", verdict, *(f"  {reason}" for reason in reasons)]))
    return EXIT_NOT_HELD if reasons else 0


def _tell(what: str, blow: "Blow") -> None:
    at = f"{blow.at_s:7.1f} s  {blow.number:3d} {blow.kind}"
    if what == "struck":
        say(f"{at}: {blow.target}")
        return
    how = "in the same generation" if blow.new_generation is None else f"in generation {blow.new_generation}"
    say(f"{at}: training continued after {blow.recovery_s:.2f} s {how}; batches recomputed: {blow.recomputed}")


async def _draw(injector: "Injector", duration_s: float, *, is_shown: bool) -> None:
    """Draw a progress bar on stderr until cancelled, if stderr is a terminal."""
    import asyncio

    if not is_shown or not sys.stderr.isatty():
        return
    from rich.progress import Progress

    from headway.daemon.base.terminal import console

    with Progress(console=console(sys.stderr), transient=True) as progress:
        bar = progress.add_task("striking", total=duration_s)
        while True:
            progress.update(bar, completed=min(duration_s, injector.now_s))
            await asyncio.sleep(0.5)
