"""Stages on one site and on two: real executors, links and processes, and an emulated line where there are two."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from rigs import pipeline_processes
from rigs.pipeline_processes import Host, Processes, StageReport, StageRun

from headway.stages.stage.context import StageContext
from lines.wan_namespaces import ADDRESSES, LARGE_MTU, PLAIN_MTU, NamespacesWan, enter, is_possible


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A stage's report, and how often its process took up a broken link."""

    stage: StageReport
    num_resumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WanRun(StageRun):
    """One stage, with a line in the middle of them all where the processes have one."""

    depths: tuple[int, ...] = (2, 1)

    def run(self, host: Host) -> Resumed:  # type: ignore[override]
        """The stage of the host's rank."""
        before = host._endpoint.num_resumed
        return Resumed(stage=StageRun.run(self, host), num_resumed=host._endpoint.num_resumed - before)

    def _context(self, stage: int) -> StageContext:
        return replace(StageRun._context(self, stage), depth=self.depths[stage])


class Apart(Processes):
    """Processes of which the first half is in one network namespace, and the other half in another."""

    def __init__(self, namespaces: Sequence[str], number: int) -> None:
        super().__init__(number)
        self._namespaces = namespaces

    def target(self, rank: int) -> Callable[[Connection, int, Path], None]:
        site = int(rank >= self._number / 2)
        return partial(_serve_in, self._namespaces[site], ADDRESSES[site])


def _serve_in(namespace: str, address: str, connection: Connection, rank: int, certificates: Path) -> None:
    enter(namespace)
    pipeline_processes.HOST = address
    pipeline_processes.serve(connection, rank, certificates)


@dataclass(frozen=True, slots=True)
class Sites:
    """Two sites, and the line between them."""

    processes: Processes
    wan: NamespacesWan


@contextmanager
def sites(*, number: int = 2, has_loss: bool = False) -> Iterator[Sites]:
    """Two sites, with `number` processes together. Ends the program in one line where this machine lets this user make
    none.
    """
    if not is_possible():
        raise SystemExit("an emulated line needs root, /dev/net/tun and iproute2")
    with NamespacesWan(mtu=PLAIN_MTU if has_loss else LARGE_MTU) as line, Apart(line.namespaces, number) as processes:
        yield Sites(processes, line)
