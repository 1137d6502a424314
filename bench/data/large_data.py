"""Large data: what a start costs while its data is hashed, and what the next ones cost.

bytes_per_cpu_s: hashed by a daemon's library in a second of processor time; bytes_per_s: in a second of the clock,
beside whatever else runs. least_slack_s: how long before its workers would have been late the job was at its worst. A
node tells every two seconds how far it is, as in a cluster, so that this does not depend on the size of the data.
next_plan_s, next_daemon_s: to open the same data for another plan, and after the daemon has started anew.

The data are shards of zeros, one sparse file under many names: they take no disk, and each is hashed.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from rigs.measure import machine, progress, versions

from headway.daemon.agent.node_reports import READING_PERIOD_S
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ReadingRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.deadlines import Deadlines
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.stages.data.shard_index import Shard, ShardIndex, combined_sha256, write_index

SHARD_BYTES = 1 << 30
LARGE_BYTES = 66e9
NAME = "large"


def zeros(folder: Path, num_shards: int) -> DataSpec:
    """A data folder of so many GiB."""
    digest, chunk = hashlib.sha256(), bytes(8 << 20)
    for _ in range(SHARD_BYTES // len(chunk)):
        digest.update(chunk)
    folder.mkdir()
    first = folder / "tokens-0.bin"
    with first.open("wb") as file:
        file.truncate(SHARD_BYTES)
    for number in range(1, num_shards):
        os.link(first, folder / f"tokens-{number}.bin")
    names = sorted(path.name for path in folder.iterdir())
    shards = tuple(Shard(file=name, num_tokens=SHARD_BYTES, sha256=digest.hexdigest()) for name in names)
    index = ShardIndex(dtype="uint8", vocab_size=256, shards=shards)
    index = replace(index, sha256=combined_sha256(index))
    write_index(folder, index)
    return DataSpec(source=str(folder), sha256=index.sha256)


@dataclass
class Leader:
    """A leader's view of a node that reads: its records, and when the job's workers would be late."""

    library: DataLibrary
    view: ClusterView = field(default_factory=lambda: ClusterView(steady_since=0.0))
    slacks: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Watch until cancelled."""
        spec = JobSpec(job=JobSection(name=NAME))
        self.view.jobs[NAME] = job = JobView(name=NAME, entered_at=time.monotonic())
        deadlines, revision = Deadlines(job, self.view, spec), 1
        while True:
            await asyncio.sleep(READING_PERIOD_S)
            self.slacks.append(deadlines.prepare - time.monotonic())
            for reading in self.library.reading.values():
                revision += 1
                record = encode(ReadingRecord(num_bytes=reading.num_bytes, total_bytes=reading.total_bytes))
                key, now = Keys.reading(NAME, "a"), time.monotonic()
                self.view.apply(key, record, mod_revision=revision, create_revision=1, now=now)


async def opened(library: DataLibrary, data: DataSpec) -> tuple[float, float]:
    """Seconds of the clock, and of this process on processors."""
    began, computed = time.monotonic(), time.process_time()
    await library.open(data)
    return time.monotonic() - began, time.process_time() - computed


async def measure(num_shards: int) -> dict[str, float]:
    """Open the data for a first plan, for the next, and in the daemon's next life."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        data, cache, memory = zeros(Path(folder) / "data", num_shards), Path(folder) / "cache", Path(folder) / "memory"
        progress(f"{num_shards} GiB are there")
        library = DataLibrary(cache, cast(NodeClient, None), list, memory=memory)
        leader = Leader(library)
        watching = asyncio.create_task(leader.watch())
        wall_s, cpu_s = await opened(library, data)
        watching.cancel()
        again_s, _ = await opened(library, data)
        later_s, _ = await opened(DataLibrary(cache, cast(NodeClient, None), list, memory=memory), data)
    num_bytes = num_shards * SHARD_BYTES
    return {
        "data_bytes": num_bytes,
        "bytes_per_cpu_s": num_bytes / cpu_s,
        "bytes_per_s": num_bytes / wall_s,
        "least_slack_s": min(leader.slacks, default=float("inf")),
        "next_plan_s": again_s,
        "next_daemon_s": later_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4, help="GiB of data; 62 are 66 GB")
    found = asyncio.run(measure(parser.parse_args().gib))
    for name, figure in found.items():
        print(f"{name:16} {figure:18,.3f}")
    alone_s, here_s = LARGE_BYTES / found["bytes_per_cpu_s"], LARGE_BYTES / found["bytes_per_s"]
    print(f"{LARGE_BYTES / 1e9:g} GB: {alone_s:.0f} s on a processor of its own, {here_s:.0f} s beside what runs here")
    bars = {
        "the deadline follows": found["least_slack_s"] >= 60.0,
        "no new hash": max(found["next_plan_s"], found["next_daemon_s"]) < 1.0,
    }
    for name, holds in bars.items():
        print(f"{name}: {'holds' if holds else 'MISSED'}")
    rounded = {name: round(figure, 3) for name, figure in found.items()}
    print(json.dumps({**rounded, "machine": machine(), "versions": versions()}))
    return int(not all(bars.values()))


if __name__ == "__main__":
    sys.exit(main())
