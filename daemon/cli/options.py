"""Options that many commands share, and the frame of a command that talks to a cluster."""

import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession

ResultT = TypeVar("ResultT")

Etcd = Annotated[
    str | None,
    typer.Option(
        help="etcd members, HOST:PORT[,HOST:PORT…] (HEADWAY_ETCD). Without it: the local cluster.", show_default=False
    ),
]
Certs = Annotated[
    Path | None,
    typer.Option(help="Folder with ca.pem, cert.pem and key.pem, for --etcd (HEADWAY_CERTS).", show_default=False),
]
Cluster = Annotated[
    Path | None,
    typer.Option(help="State folder of a local cluster (HEADWAY_CLUSTER; .headway).", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
JOB_FILE_HELP = 'A job file; the shortest: job.name = "first"'
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help=JOB_FILE_HELP)]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
LinkKind = Annotated[
    Literal["auto", "grpc", "collective"] | None,
    typer.Option("--link", help="Kind of link between workers; overrides the job file.", show_default=False),
]
OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")]
EtcdBinary = Annotated[
    Path | None,
    typer.Option(help="The etcd binary (default: HEADWAY_ETCD_BINARY, then pip's, then PATH).", show_default=False),
]


def with_cluster(
    etcd: str | None,
    certs: Path | None,
    cluster: Path | None,
    work: Callable[["ClusterSession"], Coroutine[Any, Any, ResultT]],
    *,
    warns_of_end: bool = True,
) -> ResultT:
    """Find the cluster, open a session, do the work in it, close the session.

    warns_of_end: says on stderr when the certificate ends soon.
    """
    import asyncio

    from headway.daemon import early_interrupt
    from headway.daemon.client.cluster_access import ClusterSession, find_cluster
    from headway.daemon.errors import StoreError

    address = find_cluster(etcd=etcd, certs=certs, cluster=cluster)
    if warns_of_end and (line := address.certificate_end()):
        sys.stderr.write(f"headway: {line}\n")

    async def warn(session: ClusterSession) -> None:
        with suppress(StoreError):  # the work meets the same error
            if line := await session.why_full():
                sys.stderr.write(f"headway: {line}\n")

    async def run() -> ResultT:
        async with ClusterSession(address) as session:
            warning = asyncio.create_task(warn(session))
            try:
                return await work(session)
            finally:
                await asyncio.wait({warning})

    early_interrupt.end()
    return asyncio.run(run())


def say(text: str) -> None:
    """Print a line on stdout, for people or programs."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print a value on stdout as one JSON document. A byte of a path that is no UTF-8 is `\\udcXX` in it."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), indent=2)
    say(text)


def say_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns on stdout, each as wide as its longest cell."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, *rows]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_sending(node: str, num_bytes: int, total_bytes: int) -> None:
    """Draw how much of the data a node has received."""
    from headway.daemon.terminal import behind

    if sys.stderr.isatty():
        drawn = behind(sys.stderr)
        end = "\n" if num_bytes == total_bytes else ""
        drawn.write(f"\rdata to {node}: {num_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB {end}")
        drawn.flush()
