"""Cheap copies: the CPU-seconds that one GB of boundary state costs, all processes together.

state_file_cpu_s_per_gb: a worker writes layer files with their checksum into its node's store in memory.
state_copy_cpu_s_per_gb: a second node fetches them over gRPC with TLS, both sides counted, and verifies them.
state_cpu_s_per_gb: the sum; the bar is 3. What it costs to delete files is in none of them.
state_load_vs_read: the rate at which a worker on a CPU loads a file, with its digest, over that of a plain read.
state_load_mb_per_s: that rate.

Samples alternate; processor time, unlike wall time, hardly depends on what else the machine does.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from rigs.measure import Figure, progress, report

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient, holder
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node.lifecycle import KEPT_BYTES
from headway.daemon.node.service import NodeDesk, add_node_service, bind_node_service
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.stage.allocator import keep_freed_memory
from headway.stages.state.state_file import StateHeader, read_state, write_state

FILE_BYTES = 64 << 20
IN_MEMORY = Path("/dev/shm")


def cpu_s() -> float:
    """Return the CPU seconds of this process, all its threads."""
    times = os.times()
    return times.user + times.system


async def measure(*, num_samples: int, num_files: int) -> dict[str, Figure]:
    """One sample: a few files written, then fetched."""
    tensors = {f"current/{name}": torch.randn(FILE_BYTES // 8) for name in ("a", "b")}
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    written_s, copied_s = [], []
    with tempfile.TemporaryDirectory(prefix="headway-bench-", dir=parent) as name:
        folder = Path(name)
        authority = CertificateAuthority.create(folder / "authority")
        client = NodeClient(TlsIdentity.read(authority.issue("client")))
        owner, buddy = StateStore(folder / "owner"), StateStore(folder / "buddy")
        owner.open()
        buddy.open()
        server, port = bind_node_service(TlsIdentity.read(authority.issue("owner")), "127.0.0.1", 0)
        desk = NodeDesk(
            node="owner",
            incarnation="owner-1",
            view=ClusterView(),
            store=owner,
            library=DataLibrary(folder / "data", client, list),
            client=client,
            logs_dir=folder / "logs",
            checkpoint_root=None,
            is_etcd_reachable=lambda: True,
        )
        endpoint = NodeEndpoint("owner", f"127.0.0.1:{port}")
        add_node_service(server, desk)
        await server.start()
        try:
            for sample in range(num_samples + 1):
                keys = [StateKey("bench", 1, 0, f"layer-{index}") for index in range(num_files)]
                gigabytes = num_files * FILE_BYTES / 1e9
                began = cpu_s()
                for key in keys:
                    header = StateHeader(job="bench", layer=key.layer, boundary=0, timeline=1, dtype="float32")
                    path = owner.path_of(key)
                    written = await asyncio.to_thread(write_state, path, tensors, header)
                    await owner.adopt(key, path, size_bytes=written.size_bytes, checksum=written.checksum)
                between = cpu_s()
                for key in keys:
                    held = owner.contents[key]
                    sources = [holder(client, endpoint, key, held.digest)]
                    await buddy.bring(key, sources.copy, expected=held.digest)
                ended = cpu_s()
                if sample:  # the first one touches the memory
                    written_s.append((between - began) / gigabytes)
                    copied_s.append((ended - between) / gigabytes)
                    progress(f"sample {sample} of {num_samples}: {written_s[-1]:.2f} + {copied_s[-1]:.2f} s per GB")
                for key in keys:
                    owner.delete(key)
                    buddy.delete(key)
        finally:
            await server.stop(None)
            await client.close()
    return {
        "state_file_cpu_s_per_gb": Figure.of(written_s),
        "state_copy_cpu_s_per_gb": Figure.of(copied_s),
        "state_cpu_s_per_gb": Figure.of([sum(pair) for pair in zip(written_s, copied_s, strict=True)]),
    }


def measure_load(*, num_samples: int) -> dict[str, Figure]:
    """Load one file and read it plainly, in turns."""
    rates, ratios = [], []
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="headway-bench-", dir=parent) as name:
        path = Path(name) / "layer"
        header = StateHeader(job="bench", layer="layer", boundary=0, timeline=1, dtype="float32")
        size_bytes = write_state(path, {"current/a": torch.randn(FILE_BYTES // 4)}, header).size_bytes
        for sample in range(num_samples + 1):
            began = perf_counter()
            path.read_bytes()
            between = perf_counter()
            read_state(path)
            ended = perf_counter()
            if sample:
                rates.append(size_bytes / 1e6 / (ended - between))
                ratios.append((between - began) / (ended - between))
    return {"state_load_vs_read": Figure.of(ratios), "state_load_mb_per_s": Figure.of(rates)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a first look")
    options = parser.parse_args()
    keep_freed_memory(most_bytes=KEPT_BYTES, growth_bytes=None)  # as every daemon does
    figures = asyncio.run(measure(num_samples=3 if options.quick else 9, num_files=4))
    figures |= measure_load(num_samples=9)
    report("What a GB of state costs", figures)
    return 0 if options.quick else int(figures["state_cpu_s_per_gb"].median > 3.0)


if __name__ == "__main__":
    sys.exit(main())
