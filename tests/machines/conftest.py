"""Five machines, up for all cases of this folder; each case leaves them healed."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.cluster import Cluster
from tests.machines.network import Network

NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="session")
def five_machines() -> Iterator[Cluster]:
    """Behind firewalls that let in the daemon's port and the workers' alone."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    import numpy as np

    from headway.stages.data.shard_writer import writing_shards

    folder = Path(tempfile.mkdtemp(prefix="hwm-", dir="/tmp"))
    with writing_shards(folder / "shards", vocab_size=256) as writer:
        writer.append(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    try:
        with Network.of(NAMES) as network:
            cluster = Cluster(network, folder, folder / "shards")
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.end()
    finally:
        if not os.environ.get("HEADWAY_KEEP"):
            shutil.rmtree(folder)


@pytest.fixture
def machines(five_machines: Cluster) -> Iterator[Cluster]:
    """All up, every way open, before and after."""
    five_machines.all_up()
    yield five_machines
    was_blocked = five_machines.network.heal()
    five_machines.nothing_is_left()
    if was_blocked:
        five_machines.headway("doctor")  # every daemon dials the others now, and not with back-off


@pytest.fixture(scope="session")
def plain(five_machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, bytes]]:
    """The weights of `headway reference` for a job's file, by file; jobs of one length are one job to it."""
    known: dict[str, dict[str, bytes]] = {}

    def weights(job: Path) -> dict[str, bytes]:
        key = next(line for line in job.read_text().splitlines() if line.startswith("batches"))
        if key not in known:
            out = tmp_path_factory.mktemp("plain")
            code, said = five_machines.headway("reference", str(job), "--out", str(out))
            assert code == 0, said
            known[key] = {path.name: path.read_bytes() for path in out.rglob("*.safetensors")}
        return known[key]

    return weights
