"""Five machines, up for all cases of this folder; each case leaves them healed."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.machines.cluster import Cluster
from tests.machines.internet import Host, Internet, why_impossible
from tests.machines.network import Network
from tests.machines.observer import Observer
from tests.machines.sites import MEMBERS, NODES, Sites, hosts
from tests.rigs.programs import write_tokens

NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="session")
def five_machines() -> Iterator[Cluster]:
    """Behind firewalls that let in the daemon's port and the workers' alone."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    folder = Path(tempfile.mkdtemp(prefix="hwm-", dir="/tmp"))
    data = write_tokens(folder / "shards")
    try:
        with Network.of(NAMES) as network:
            cluster = Cluster(folder, data, network)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.end()
    finally:
        if not os.environ.get("HEADWAY_KEEP"):
            shutil.rmtree(folder)


@contextmanager
def sites_of(machines: Sequence[Host]) -> Iterator[Sites]:
    """Start a cluster by the deployment page; all is gone afterwards."""
    if lack := why_impossible():
        pytest.skip(lack)
    folder = Path(tempfile.mkdtemp(prefix="hwi-", dir="/var/tmp"))
    try:
        with Internet.of(machines, folder) as internet:
            sites = Sites(folder, write_tokens(folder / "shards"), internet)
            try:
                sites.start()
                yield sites
            finally:
                sites.end()
    finally:
        if not os.environ.get("HEADWAY_KEEP"):
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def five_sites() -> Iterator[Sites]:
    """A cluster of five nodes at five places; up for all cases."""
    with sites_of(hosts()) as sites:
        yield sites


@pytest.fixture
def three_sites() -> Iterator[Sites]:
    """One node is plain, one has a mapped port, one can only dial out; etcd has one member."""
    with sites_of(hosts(members=MEMBERS[:1], nodes=NODES[:3])) as sites:
        yield sites
        sites.nothing_is_left()


@pytest.fixture
def sites(five_sites: Sites) -> Iterator[Sites]:
    """All up, before and after."""
    five_sites.all_up()
    yield five_sites
    for name in five_sites.names:
        five_sites.internet.heal(name)
    five_sites.nothing_is_left()


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
def plain() -> Callable[[Observer, Path], dict[str, bytes]]:
    """The weights of `headway reference` for a job's file, by file; jobs of one length are one job to it."""
    known: dict[str, dict[str, bytes]] = {}

    def weights(seen: Observer, job: Path) -> dict[str, bytes]:
        key = next(line for line in job.read_text().splitlines() if line.startswith("batches"))
        if key not in known:
            out = seen.folder / f"plain-{len(known)}"
            code, said = seen.headway("reference", str(job), "--out", str(out))
            assert code == 0, said
            known[key] = {path.name: path.read_bytes() for path in out.rglob("*.safetensors")}
        return known[key]

    return weights
