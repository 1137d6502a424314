"""A process with many daemons' memberships: real records, leases, watches, streams between daemons; fake workers.

What a daemon measures of its network (ways, ports) is answered at once: a thousand daemons on one machine would
measure that machine. The daemons start at the first line on stdin, and end with stdin. Prints its figures once a
second, each time as one line of JSON.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import os
import sys
import threading
import time
from asyncio import events
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headway.daemon.agent import probing
from headway.daemon.base.activities import Activities
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.base.logging import configure_logs
from headway.daemon.base.own_process import keep_what_stays
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.client import EtcdClient, Snapshot
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.cluster.watch import WatchBatch
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.jobs.job import DataSpec
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.net.reach_target import Target
from headway.daemon.node import membership
from headway.daemon.node.memory import NodeMemory
from headway.daemon.node.service import NodeDesk, add_node_service
from headway.daemon.node.settings import NodeConfig
from headway.daemon.node.stream_limits import bind_node_service
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.tls_identity import TlsIdentity
from rigs.fake_workers import FakeSupervisor

TELL_EVERY_S = 1.0
RESTART_S = 1.0
PROFILE_EVERY_S = 10.0
WAY = LinkProbe(round_trip_s=0.001, bytes_per_s=1e9)


class Counts:
    """What the daemons of this process have received, and how long its event loop was busy with one thing."""

    def __init__(self) -> None:
        self.watched_bytes = 0
        self.num_events = 0
        self.num_batches = 0
        self.listed_bytes = 0
        self.by_kind: dict[str, list[int]] = {}
        """First part of a key, or leaf of a job, to the number of its events and their bytes."""
        self.blocked_s = 0.0
        self.blocked_by = ""
        self.blocked_cpu_s = 0.0

    def saw(self, batch: WatchBatch) -> None:
        """Count a batch of a watch."""
        self.num_batches += 1
        for event in batch.events:
            size = len(event.key) + len(event.value or b"")
            self.num_events += 1
            self.watched_bytes += size
            parts = event.key.removeprefix("/headway/").split("/")
            kind = "/".join(["jobs", *parts[2:3]]) if parts[0] == "jobs" else parts[0]
            entry = self.by_kind.setdefault(kind, [0, 0])
            entry[0] += 1
            entry[1] += size

    def watch_callbacks(self) -> None:
        """Note the longest callback of the event loop from now on, by the wall and by this thread's own work."""
        run = events.Handle._run

        def timed(handle: Any) -> None:
            began, worked = time.perf_counter(), time.thread_time()
            run(handle)
            self.blocked_s = max(self.blocked_s, time.perf_counter() - began)
            worked_s = time.thread_time() - worked
            if worked_s > self.blocked_cpu_s:
                tasks = [each for each in gc.get_referents(handle._callback) if isinstance(each, asyncio.Task)]
                self.blocked_cpu_s, self.blocked_by = worked_s, repr((*tasks, handle)[0])[:300]

        setattr(events.Handle, "_run", timed)  # noqa: B010 - no type has this method


class CountedClient(EtcdClient):
    """The product's client, which counts what it receives."""

    def __init__(self, access: EtcdAccess, counts: Counts) -> None:
        super().__init__(access)
        self._counts = counts

    async def get_prefix(self, prefix: str, **options: Any) -> Snapshot:
        """List, and count."""
        found = await super().get_prefix(prefix, **options)
        self._counts.listed_bytes += sum(len(entry.key) + len(entry.value) for entry in found.entries)
        return found

    async def watch(self, prefix: str, **options: Any) -> AsyncIterator[WatchBatch]:
        """Watch, and count."""
        async for batch in super().watch(prefix, **options):
            self._counts.saw(batch)
            yield batch


class NoData(DataLibrary):
    """Has every data set, because no worker reads one."""

    async def open(self, data: DataSpec) -> Path:  # noqa: ARG002
        """Return a folder that nobody reads."""
        return Path("/dev/null")

    async def look_ahead(self, data: DataSpec) -> None:
        """Read nothing."""


class FakeNode:
    """One daemon without workers."""

    def __init__(self, name: str, options: argparse.Namespace, counts: Counts) -> None:
        folder = options.folder / name
        self.name = name
        identity = TlsIdentity.read(options.certificates / name)
        config = NodeConfig(
            name=name,
            etcd=tuple(options.etcd),
            certificates=options.certificates / name,
            state_dir=folder,
            lease_ttl_s=options.lease_ttl_s,
        )
        self.memory = NodeMemory(folder)
        store = StateStore(folder / "layers")
        self.etcd = CountedClient(EtcdAccess(endpoints=config.etcd, identity=identity), counts)
        self.cluster = ClusterWatch(self.etcd, view=ClusterView())
        self.cluster.leads = lambda: False  # as a daemon does until it stands for leader
        self._client = client = NodeClient(identity)
        self._server, port = bind_node_service(identity, "127.0.0.1", 0)
        self.memory.open()
        store.open()
        library = NoData(folder / "data", client, lambda: list[NodeEndpoint]())
        number = int(name.rpartition("-")[2])
        record = NodeRecord(
            name=name,
            incarnation="",
            address=f"127.0.0.1:{port}",
            host=f"machine-{number}",
            site=f"site-{number % 5}",
            devices=(Device(kind="cpu", model="fake", arithmetic_class="one"),),
            memory_bytes=64 << 30,
            arithmetic_class="one",
        )
        activities = Activities(node=name)
        outgoing = OutgoingTransfers(0)
        self.membership = membership.Membership(
            membership.Services(
                config=config,
                record=record,
                memory=self.memory,
                etcd=self.etcd,
                cluster=self.cluster,
                store=store,
                library=library,
                client=client,
                identity=identity,
                outgoing=outgoing,
                activities=activities,
                runtime_dir=folder,
            )
        )
        self._activities = activities
        self.has_joined = False
        self.num_false_starts = 0
        add_node_service(
            self._server,
            NodeDesk(
                node=name,
                incarnation=self.membership.incarnation,
                view=self.cluster.view,
                store=store,
                library=library,
                client=client,
                logs_dir=folder,
                checkpoint_root=None,
            ),
        )

    async def run(self) -> None:
        """Be a member until cancelled."""
        await self._server.start()
        following = asyncio.create_task(self._activities.keep("cluster watch", self.cluster.run))
        try:
            while not self.has_joined:
                try:
                    await self.membership.join()
                    self.has_joined = True
                except StoreUnreachableError:  # a service manager would start the daemon again
                    self.num_false_starts += 1
                    await asyncio.sleep(RESTART_S)
            await self.membership.run()
        finally:
            following.cancel()


async def serve(options: argparse.Namespace) -> None:
    """Run the nodes, and tell, until stdin ends."""
    counts, loop = Counts(), asyncio.get_running_loop()
    ended, wanted = asyncio.Event(), asyncio.Event()
    loop.add_reader(sys.stdin, lambda: wanted.set() if os.read(0, 100) else ended.set())
    setattr(membership, "Supervisor", FakeSupervisor)  # noqa: B010
    setattr(membership, "dial", _answers)  # noqa: B010
    setattr(probing, "measure", _measured)  # noqa: B010
    if options.watch_callbacks:
        counts.watch_callbacks()
    names = [f"node-{number:04d}" for number in range(options.first, options.first + options.number)]
    nodes = [FakeNode(name, options, counts) for name in names]
    telling = asyncio.create_task(_tell(nodes, counts))
    keep_what_stays()
    await wanted.wait()
    running = [asyncio.create_task(node.run(), name=node.name) for node in nodes]
    ending = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait({*running, telling, ending}, return_when=asyncio.FIRST_COMPLETED)
    if ending not in done:
        for task in done:
            task.result()
        raise RuntimeError(f"ended by itself: {done}")
    os._exit(0)  # leases end by themselves: what the nodes would do at their end is not measured


async def _answers(_target: Target, _identity: TlsIdentity, *, source: str) -> str:  # noqa: ARG001
    return ""


async def _measured(_client: NodeClient, _endpoint: NodeEndpoint) -> LinkProbe:
    return WAY


async def _tell(nodes: list[FakeNode], counts: Counts) -> None:
    while True:
        told = {
            "joined": sum(node.has_joined for node in nodes),
            "false_starts": sum(node.num_false_starts for node in nodes),
            "fewest_seen": min(len(node.cluster.view.nodes) for node in nodes),
            "most_seen": max(len(node.cluster.view.nodes) for node in nodes),
            "oldest_revision": min(node.cluster.revision for node in nodes),
            "watched_bytes": counts.watched_bytes,
            "num_events": counts.num_events,
            "num_batches": counts.num_batches,
            "listed_bytes": counts.listed_bytes,
            "by_kind": counts.by_kind,
            "blocked_ms": 1e3 * counts.blocked_s,
            "blocked_cpu_ms": 1e3 * counts.blocked_cpu_s,
            "blocked_by": counts.blocked_by,
            "cpu_s": time.process_time(),
            "num_files": len(list(Path("/proc/self/fd").iterdir())),
            "at": time.monotonic(),
        }
        print(json.dumps(told), flush=True)
        counts.blocked_s = counts.blocked_cpu_s = 0.0
        await asyncio.sleep(TELL_EVERY_S)


def _keep(profile: cProfile.Profile, path: Path) -> None:
    while True:
        time.sleep(PROFILE_EVERY_S)
        profile.dump_stats(path)


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--certificates", type=Path, required=True)
    parser.add_argument("--etcd", nargs="+", required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first node")
    parser.add_argument("--number", type=int, required=True, help="number of nodes")
    parser.add_argument("--lease-ttl-s", type=int, default=5)
    parser.add_argument("--watch-callbacks", action="store_true", help="note the longest callback of the event loop")
    parser.add_argument("--log-level", default="error")
    parser.add_argument("--profile", type=Path, help="where cProfile writes what this process did, every ten seconds")
    options = parser.parse_args()
    raise_open_file_limit()
    configure_logs(options.log_level, "json", node=f"process of node-{options.first:04d}")
    if options.profile is None:
        asyncio.run(serve(options))
        return
    profile = cProfile.Profile(time.thread_time)  # two busy cores: by the wall, all seconds would be waiting
    threading.Thread(target=_keep, args=(profile, options.profile), daemon=True).start()
    profile.runcall(asyncio.run, serve(options))


if __name__ == "__main__":
    main()
