"""Links by NCCL: a survivor of a peer's death lives, and so do two workers on one card.

NCCL refuses a card twice: `auto` gives such workers gRPC (link_choice.py), and a link finds by the card's UUID that it
is theirs both. So the test of one card shows that this leads through the hosts, and those of transfers need two. With
HEADWAY_GPU_TESTS_ON=cpu those of a death run on gloo.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headway.daemon.local.cluster import LocalCluster
from headway.daemon.net.certificates import CertificateAuthority
from tests.integration.exactness.training import Oracle, assert_same_bits, small_job, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
needs_two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a card for each worker")
ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
"""For the import of torch, CUDA's context, and NCCL's first use."""


class Peer:
    """A process of `nccl_peer.py`."""

    def __init__(self, rank: int, device: str, folder: Path) -> None:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.nccl_peer", str(rank), device, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def says(self, start: str, *, within_s: float) -> str:
        """Return its next line, which must begin so."""
        line = self._lines.get(timeout=within_s)
        assert line.startswith(start), line
        return line

    def end(self) -> None:
        """Kill it, and read to its end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")


@contextmanager
def peers(*devices: str) -> Iterator[tuple[Peer, Peer]]:
    """Both ends of a link; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/tmp") as name:  # short enough for a socket
        folder = Path(name)
        issued = CertificateAuthority.create(folder / "authority").issue("node")
        issued.rename(folder / "certificates")
        both = [Peer(rank, device, folder) for rank, device in enumerate(devices)]
        try:
            yield both[0], both[1]
        finally:
            for peer in both:
                peer.end()


@pytest.fixture
def two(kind: str) -> tuple[str, str]:
    """Two devices."""
    if kind == "cpu":
        return "cpu", "cpu"
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a card for each worker")
    return "cuda:0", "cuda:1"


@pytest.mark.parametrize("dead", [0, 1], ids=["dialler", "acceptor"])
def test_a_peers_death_in_the_middle_of_a_transfer_leaves_the_survivor_alive(two: tuple[str, str], dead: int) -> None:
    """Frames of 256 MiB go both ways; one process is killed: the other aborts its transfers, loses the link after its
    silence, and computes on."""
    with peers(*two) as both:
        for peer in both:
            peer.says("exchanging", within_s=START_S)
        victim, survivor = both[dead].process, both[1 - dead]
        victim.send_signal(signal.SIGKILL)
        began = time.monotonic()
        survivor.says("lost: ", within_s=15)
        assert survivor.says("alive: ", within_s=10) == "alive: 1000"
        survivor.says("ended", within_s=10)
        assert time.monotonic() - began < 20
        assert survivor.process.wait(timeout=20) == 0


def test_a_peer_that_stands_still_leaves_the_survivor_alive(two: tuple[str, str]) -> None:
    """One process is stopped in the middle, and killed only later: nothing ends the other meanwhile."""
    with peers(*two) as (stopped, survivor):
        for peer in (stopped, survivor):
            peer.says("exchanging", within_s=START_S)
        stopped.process.send_signal(signal.SIGSTOP)
        with pytest.raises(queue.Empty):
            survivor.says("", within_s=5)
        assert survivor.process.poll() is None
        stopped.process.kill()
        survivor.says("lost: ", within_s=15)
        survivor.says("alive: 1000", within_s=10)


@needs_a_card
def test_two_workers_on_one_card_exchange_through_their_hosts() -> None:
    """Both find that the card is theirs both, and take the stream; a death then costs the link alone.

    `auto` never tries this.
    """
    with peers("cuda:0", "cuda:0") as (victim, survivor):
        for peer in (victim, survivor):
            peer.says("exchanging", within_s=START_S)
        victim.process.kill()
        survivor.says("lost: ", within_s=15)
        survivor.says("alive: 1000", within_s=10)
        survivor.says("ended", within_s=30)
        assert survivor.process.wait(timeout=20) == 0


@needs_two_cards
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_stages_on_two_cards_give_the_bits_of_the_plain_loop(tmp_path: Path, dtype: str) -> None:
    """`auto` joins two cards of one machine by NCCL: losses and weights are those of one loop on one card."""
    spec = small_job(f"nccl-{dtype}", device="cuda", dtype=dtype)
    async with LocalCluster(tmp_path / "state", num_nodes=2) as cluster:
        result = await train(cluster, spec, tmp_path / "out", num_nodes=2)
    assert_same_bits(result, Oracle(tmp_path / "oracle", device="cuda")(spec))
