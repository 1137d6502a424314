"""Many daemons on one real etcd: how long they take to join, what they write, and what follows when many are lost.

Each daemon has its own registration, lease, watch, records, streams to the leader's daemon, and agent: the product's
own code (bench/rigs/agent_process.py). Only its worker and the lines to other machines are fake. The first daemon has a
process for itself, and leads. joined_N_s: from the start of N - 1 daemons, in processes that have imported their
modules, until the leader sees all N nodes; settled_N_s: until every daemon sees them all. running_N_s: from the
submission of the jobs until all are running. planned_N_s and lost_N_s: from the death of a process with a tenth of the
daemons until every job that it hit has a plan without them, and until it runs under that plan. join_cpu_N_s,
join_etcd_cpu_N_s: seconds of a core that all daemons, and etcd, use until the joining has become quiet.
watched_plan_N_kb: what each daemon receives for one plan. watched_idle_N_bytes_s: what each daemon receives per second
while all jobs run and nothing happens. blocked_N_ms: the longest callback of the leader's event loop since the nodes
began to join; blocked_cpu_N_ms: the longest by that thread's own work, because the machine has two cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rigs.measure import machine, progress

from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.binary import find_etcd_binary
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.spec import ModelSpec, TrainSpec

AGENT_PROCESS = Path(__file__).parents[1] / "rigs" / "agent_process.py"
SIZES = (10, 100)
NUM_JOBS: Final = 4
STAGES: Final = 16
LEASE_TTL_S: Final = 30
"""Longer than a daemon's own 5 s: on two cores a thousand daemons wait for each other. Dead ones are found by refused
connections before that.
"""
FIRST_NICE: Final = -15
"""etcd and the leader go first, where this user may say so: in a cluster each of them has a machine, and no daemon
takes its time.
"""
JOINED_BAR_S: Final = 50.0
PLANNED_BAR_S: Final = 5.0
LOST_BAR_S: Final = 15.0
"""Until all run again: most of it is what daemons on two cores make each other wait."""
BLOCKED_BAR_MS: Final = 100.0
LOOK_EVERY_S: Final = 0.05


@dataclass(slots=True)
class AgentProcess:
    """One process of daemons, and its last words."""

    first: int
    number: int
    process: asyncio.subprocess.Process
    told: dict[str, Any] = field(default_factory=dict)
    blocked_ms: float = 0.0
    blocked_cpu_ms: float = 0.0
    blocked_by: str = ""
    is_dead: bool = False

    async def go(self) -> None:
        """Let the daemons start."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        await self.process.stdin.drain()

    async def listen(self) -> None:
        """Take each line of figures, until the process ends."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.told = json.loads(line)
            self.blocked_ms = max(self.blocked_ms, self.told["blocked_ms"])
            if self.told["blocked_cpu_ms"] > self.blocked_cpu_ms:
                self.blocked_cpu_ms, self.blocked_by = self.told["blocked_cpu_ms"], self.told["blocked_by"]


class Cluster:
    """A real etcd and the processes of daemons."""

    def __init__(self, folder: Path, etcd: EtcdServer, authority: CertificateAuthority, options: Any) -> None:
        self.folder = folder
        self.etcd = etcd
        self.patience_s = options.patience_s
        self.processes: list[AgentProcess] = []
        self._authority = authority
        self._options = options
        self._listening: list[asyncio.Task[None]] = []

    async def start(self, first: int, number: int, *, is_leader: bool = False) -> AgentProcess:
        """Start a process of daemons."""
        arguments = [
            *("--folder", str(self.folder / "nodes"), "--certificates", str(self._authority.directory)),
            *("--etcd", self.etcd.endpoint, "--first", str(first), "--number", str(number)),
            *("--log-level", self._options.log_level, "--lease-ttl-s", str(self._options.lease_ttl_s)),
            *(["--watch-callbacks"] if is_leader else []),
            *(["--profile", str(self._options.profile)] if self._options.profile and first == 1 else []),
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(AGENT_PROCESS),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            start_new_session=is_leader,
        )
        if is_leader:
            go_first(process.pid)
        found = AgentProcess(first, number, process)
        self.processes.append(found)
        self._listening.append(asyncio.create_task(found.listen()))
        return found

    def names(self, number: int) -> list[str]:
        """Make certificates for the nodes, and return their names."""
        names = [f"node-{index:04d}" for index in range(number)]
        for name in names:
            self._authority.issue(name)
        return names

    async def stop(self) -> None:
        """Kill all processes."""
        for each in self.processes:
            if each.process.returncode is None:
                each.process.kill()
            await each.process.wait()
        for task in self._listening:
            task.cancel()

    def total(self, name: str) -> float:
        """Return the sum of a figure over the processes that were not killed."""
        return float(sum(each.told.get(name, 0) for each in self.processes if not each.is_dead))

    def cpu_s(self) -> tuple[float, float]:
        """Return the seconds of a core that the daemons have used, and those of etcd."""
        fields = Path(f"/proc/{self.etcd.pid}/stat").read_text().rpartition(")")[2].split()
        return self.total("cpu_s"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return the events by kind of key: (number, bytes)."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.processes:
            for kind, (number, size) in each.told.get("by_kind", {}).items() if not each.is_dead else ():
                before = found.get(kind, (0, 0))
                found[kind] = before[0] + number, before[1] + size
        return found


def go_first(pid: int) -> None:
    """Let a process go before others. Linux may weigh sessions first, and processes only within each of them."""
    session = Path(f"/proc/{pid}/autogroup")
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), FIRST_NICE)
        if session.exists():
            session.write_text(str(FIRST_NICE))
    except OSError as error:
        progress(f"process {pid} does not go first, and waits for the daemons: {error}")


async def until(what: str, is_there: Callable[[], Awaitable[bool]], cluster: Cluster) -> float:
    """Wait for something; return the seconds."""
    began = time.monotonic()
    while not await is_there():
        for each in cluster.processes:
            if each.process.returncode is not None and not each.is_dead:
                raise RuntimeError(f"the process of node {each.first} ended by itself while waiting for {what}")
        if time.monotonic() > began + cluster.patience_s:
            told = [{key: value for key, value in each.told.items() if key != "by_kind"} for each in cluster.processes]
            raise TimeoutError(f"waited {cluster.patience_s:g} s for {what}: {told}")
        await asyncio.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


def spec(number: int, num_stages: int) -> JobSpec:
    """Return a job that needs a number of nodes, and takes no more."""
    return JobSpec(
        job=JobSection(name=f"job-{number:02d}"),
        model=ModelSpec(num_hidden_layers=32, hidden_size=64, intermediate_size=128),
        data=DataSpec(sha256="0" * 64),
        train=TrainSpec(batches=1_000_000, microbatches=32),
        fault=FaultSpec(snapshot_every=0, checkpoint_every=0),
        placement=PlacementSpec(min_nodes=num_stages, max_nodes=num_stages),
    )


def is_running(job: JobView | None) -> bool:
    """Return whether a job is in force."""
    return job is not None and job.phase.phase is Phase.RUNNING and job.plan is not None


def names_in(job: JobView) -> set[str]:
    """Return the nodes of a job's plan."""
    return {stage.node for stage in job.plan.workers} if job.plan is not None else set()


async def measure(size: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a cluster of one size."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headway-agents-") as path:
        folder = Path(path)
        authority = CertificateAuthority.create(folder / "ca")
        config = EtcdServerConfig(
            binary=find_etcd_binary(None),
            data_dir=folder / "etcd",
            log_file=folder / "etcd.log",
            certificates=authority.issue("etcd"),
        )
        async with await EtcdServer.start(config) as etcd:
            go_first(etcd.pid)
            cluster = Cluster(folder, etcd, authority, options)
            try:
                await _measure(size, cluster, options, found)
            finally:
                await cluster.stop()
    return found


async def _measure(size: int, cluster: Cluster, options: argparse.Namespace, found: dict[str, float]) -> None:
    cluster.names(size)
    client = cluster._authority.issue("client")
    identity = TlsIdentity.read(client)
    assert identity is not None
    address = ClusterAddress(etcd=(cluster.etcd.endpoint,), certificates=client, state_dir=cluster.folder)
    async with ClusterSession(address, timeout_s=30.0) as session:
        view = ClusterView()

        async def look() -> ClusterView:
            nonlocal view
            view = await session.view()
            return view

        # The first daemon leads, and has a process for itself.
        leading = await cluster.start(0, 1, is_leader=True)
        await leading.go()

        async def has_leader() -> bool:
            return (await look()).leader is not None

        await until("a leader", has_leader, cluster)
        rest = size - 1
        per_process = max(size // 10, 1)
        first = 1
        while rest > 0:
            number = min(per_process, rest)
            await cluster.start(first, number)
            first, rest = first + number, rest - number

        async def are_up() -> bool:
            return all(each.told for each in cluster.processes)

        await until("the processes", are_up, cluster)
        leading.blocked_ms = leading.blocked_cpu_ms = 0.0
        began, (cpu_s, etcd_cpu_s) = time.monotonic(), cluster.cpu_s()
        for each in cluster.processes[1:]:
            await each.go()

        async def has_all() -> bool:
            return bool(leading.told.get("fewest_seen", 0) >= size)

        async def all_have_all() -> bool:
            return all(each.told.get("fewest_seen", 0) >= size for each in cluster.processes)

        await until("all nodes", has_all, cluster)
        found[f"joined_{size}_s"] = time.monotonic() - began
        progress(f"{size} nodes joined after {found[f'joined_{size}_s']:.1f} s")
        if not options.hurry:
            await until("every node's view", all_have_all, cluster)
            found[f"settled_{size}_s"] = time.monotonic() - began
            await _quiet(cluster)
            found[f"quiet_{size}_s"] = time.monotonic() - began
        spent_s, etcd_spent_s = cluster.cpu_s()
        found[f"join_cpu_{size}_s"], found[f"join_etcd_cpu_{size}_s"] = spent_s - cpu_s, etcd_spent_s - etcd_cpu_s
        found[f"join_replies_per_node_{size}"] = cluster.total("num_batches") / size
        found[f"false_starts_{size}"] = cluster.total("false_starts")
        found[f"join_events_per_node_{size}"] = cluster.total("num_events") / size
        found[f"join_watched_per_node_{size}_kb"] = cluster.total("watched_bytes") / size / 1e3
        found[f"join_listed_per_node_{size}_kb"] = cluster.total("listed_bytes") / size / 1e3
        _show(cluster, "joining", {})

        # Jobs.
        num_stages = max(1, min(STAGES, size // (2 * options.jobs)))
        jobs = [f"job-{number:02d}" for number in range(options.jobs)]
        seen, kinds = cluster.total("watched_bytes"), cluster.kinds()
        began = time.monotonic()
        for number in range(options.jobs):
            await submit(session, spec(number, num_stages))

        async def all_run() -> bool:
            await look()
            return all(is_running(view.jobs.get(job)) for job in jobs)

        await until("all jobs", all_run, cluster)
        found[f"running_{size}_s"] = time.monotonic() - began
        progress(f"{options.jobs} jobs of {num_stages} stages run after {found[f'running_{size}_s']:.1f} s")
        if not options.hurry:
            await _quiet(cluster)
        plans = sum(job.plan.generation for job in view.jobs.values() if job.plan is not None)
        found[f"watched_plan_{size}_kb"] = (cluster.total("watched_bytes") - seen) / size / max(plans, 1) / 1e3
        _show(cluster, "the jobs' start", kinds)

        # Nothing happens.
        seen, listed, kinds = cluster.total("watched_bytes"), cluster.total("listed_bytes"), cluster.kinds()
        cpu, began = cluster.total("cpu_s"), time.monotonic()
        await asyncio.sleep(options.idle_s)
        spent_s = time.monotonic() - began
        found[f"watched_idle_{size}_bytes_s"] = (cluster.total("watched_bytes") - seen) / spent_s / size
        found[f"listed_idle_{size}_bytes_s"] = (cluster.total("listed_bytes") - listed) / spent_s / size
        found[f"cpu_idle_{size}_ms_s"] = 1e3 * (cluster.total("cpu_s") - cpu) / spent_s / size
        _show(cluster, "training", kinds)

        # A tenth is lost: the process with the most nodes of plans.
        await look()
        planned = {name for job in view.jobs.values() for name in names_in(job)}
        sizes = {
            each.first: len(planned & {f"node-{number:04d}" for number in range(each.first, each.first + each.number)})
            for each in cluster.processes
            if each is not leading
        }
        lost = max((each for each in cluster.processes if each is not leading), key=lambda each: sizes[each.first])
        gone = {f"node-{number:04d}" for number in range(lost.first, lost.first + lost.number)}
        hit = {name: job.plan.generation for name, job in view.jobs.items() if job.plan and names_in(job) & gone}
        lost.is_dead = True
        lost.process.kill()
        began = time.monotonic()

        async def has_plans() -> bool:
            await look()
            newest = {name: view.jobs[name].next or view.jobs[name].plan for name in hit}
            return all(plan and not {stage.node for stage in plan.workers} & gone for plan in newest.values())

        await until("new plans", has_plans, cluster)
        found[f"planned_{size}_s"] = time.monotonic() - began

        async def has_recovered() -> bool:
            await look()
            return all(is_running(view.jobs[name]) and not names_in(view.jobs[name]) & gone for name in hit)

        await until("the jobs to run again", has_recovered, cluster)
        found[f"lost_{size}_s"] = time.monotonic() - began
        seconds = f"{found[f'planned_{size}_s']:.1f} s to new plans, {found[f'lost_{size}_s']:.1f} s until all run"
        progress(f"{len(hit)} jobs lost {len(gone & planned)} of {len(gone)} nodes: {seconds}")

        async def all_see() -> bool:
            return all(each.told["most_seen"] <= size - len(gone) for each in cluster.processes if not each.is_dead)

        if not options.hurry:
            await until("the lost nodes' records to go", all_see, cluster)
            found[f"lost_seen_{size}_s"] = time.monotonic() - began
        status = await session.client.status()
        found[f"database_{size}_mb"] = status.database_bytes / 1e6
        found[f"revisions_{size}"] = status.revision
        listed_now = await session.client.get_prefix("/headway/")
        found[f"listing_{size}_mb"] = sum(len(entry.key) + len(entry.value) for entry in listed_now.entries) / 1e6
        found[f"leader_files_{size}"] = leading.told["num_files"]
        found[f"blocked_{size}_ms"] = leading.blocked_ms
        found[f"blocked_cpu_{size}_ms"] = leading.blocked_cpu_ms
        progress(f"longest work of the leader: {leading.blocked_by}")


async def _quiet(cluster: Cluster) -> None:
    """Wait until the nodes have written what follows from an event: three seconds with few events."""
    calm, before = 0, cluster.total("num_events")
    number = sum(each.number for each in cluster.processes)
    for _ in range(120):
        await asyncio.sleep(1.0)
        now = cluster.total("num_events")
        calm = calm + 1 if now - before < 10 * number else 0
        before = now
        if calm >= 3:
            return


def _show(cluster: Cluster, what: str, before: dict[str, tuple[int, int]]) -> None:
    """Tell which kinds of keys the events of a phase were about."""
    number = sum(each.number for each in cluster.processes)
    for kind, (events, size) in sorted(cluster.kinds().items(), key=lambda entry: -entry[1][1]):
        earlier = before.get(kind, (0, 0))
        events, size = events - earlier[0], size - earlier[1]
        if events:
            progress(f"  {what}: {kind}: {events / number:.1f} events and {size / number / 1e3:.1f} kB a daemon")


def main() -> int:
    """Print the table, or one line of JSON alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of daemons")
    parser.add_argument("--jobs", type=int, default=NUM_JOBS)
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds of training that are measured")
    parser.add_argument("--lease-ttl-s", type=int, default=LEASE_TTL_S)
    parser.add_argument("--patience-s", type=float, default=300.0, help="longest time of one phase")
    parser.add_argument("--hurry", action="store_true", help="wait for the leader's view alone, not for every daemon's")
    parser.add_argument("--log-level", default="error", help="of the daemons")
    parser.add_argument("--profile", type=Path, help="where cProfile writes what the second process did")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))
    raise_open_file_limit()
    found: dict[str, float] = {}
    for size in options.sizes:
        progress(f"{size} daemons")
        found |= asyncio.run(measure(size, options))
    largest = max(options.sizes)
    is_met = (
        found[f"joined_{largest}_s"] <= JOINED_BAR_S
        and found[f"planned_{largest}_s"] <= PLANNED_BAR_S
        and found[f"lost_{largest}_s"] <= LOST_BAR_S
        and found[f"blocked_{largest}_ms"] <= BLOCKED_BAR_MS
    )
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in found.items()}))
    else:
        print(machine())
        for key, value in found.items():
            print(f"{key:32s} {value:12.3f}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
