"""A worker of a card has CUDA's and torch's settings, and runs beside its card. The user's own choice wins."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.daemon.worker import card_host
from headway.daemon.worker.card_host import card_settings, move_near, near_cores, pci_address
from headway.daemon.worker.roster import environment_for
from headway.stages.sockets.core_threads import EXPERIMENTS, OFFLOAD

CARD = "0000:1b:00.0"
USUAL = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def sysfs(root: Path, *, node: str, cores: str) -> Path:
    """A kernel's view of one card beside the memory of one node."""
    card, memory = root / "bus/pci/devices" / CARD, root / "devices/system/node/node1"
    for folder in (card, memory):
        folder.mkdir(parents=True)
    (card / "numa_node").write_text(f"{node}\n")
    (memory / "cpulist").write_text(f"{cores}\n")
    return root


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        ({}, set()),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF"}),
        ({"PYTORCH_HIP_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF"}),
    ],
)
def test_a_card_has_its_settings_unless_the_user_has_made_them(own: dict[str, str], missing: set[str]) -> None:
    """In any of torch's spellings: the newest one would override the others."""
    assert card_settings(own, "127.0.0.1") == {name: value for name, value in USUAL.items() if name not in missing}


def test_only_a_worker_of_a_card_gets_them(tmp_path: Path) -> None:
    """A CPU's has its large pages alone; both have the folder of compiled code, and gRPC that encrypts aside."""
    on_card, on_cpu = (environment_for(kind, tmp_path, {}, "host.name") for kind in ("cuda", "cpu"))
    assert on_card == on_cpu | USUAL
    assert not on_cpu.keys() & USUAL.keys()
    assert on_cpu["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert on_cpu[EXPERIMENTS] == OFFLOAD


def test_nccl_meets_others_where_they_dial_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the interface of the node's address, by its whole name, unless the user has named one."""
    addresses = [("lo", "127.0.0.1"), ("br-12ab", "172.18.0.1"), ("eth1", "10.0.0.7")]
    monkeypatch.setattr(card_host, "interface_addresses", lambda: addresses)
    assert card_settings({}, "10.0.0.7") == USUAL | {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert card_settings({"NCCL_SOCKET_IFNAME": "br"}, "10.0.0.7") == USUAL
    assert card_settings({}, "203.0.113.5") == USUAL


def test_a_cards_address_is_the_kernels() -> None:
    """Hexadecimal, of fixed width."""
    assert pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=0)) == CARD


@pytest.mark.parametrize(
    ("node", "cores", "allowed", "near"),
    [
        ("1", "8-11,24-27", range(32), {8, 9, 10, 11, 24, 25, 26, 27}),
        ("1", "8-15", range(4, 12), {8, 9, 10, 11}),
        ("1", "8-15", range(8), set()),
        ("1", "8-15", range(6, 11), set()),
        ("1", "0-7", range(8), set()),
        ("-1", "0-7", range(16), set()),
        ("nothing", "0-7", range(16), set()),
        ("1", "", range(16), set()),
    ],
    ids=["near", "cgroup", "cgroup elsewhere", "few", "all near", "one memory", "unreadable", "no cores"],
)
def test_the_cores_near_a_card(tmp_path: Path, node: str, cores: str, allowed: range, near: set[int]) -> None:
    """Only of those that the cgroup allows, and only where enough of them are left."""
    found = near_cores(CARD, frozenset(allowed), sysfs=sysfs(tmp_path, node=node, cores=cores))
    assert found == near
    assert near_cores("0000:ff:00.0", frozenset(allowed), sysfs=tmp_path) == set()


def test_all_threads_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that began before; a cgroup that takes the cores away meanwhile is no error."""
    moved: dict[int, set[int]] = {}

    def note(thread: int, cores: frozenset[int]) -> None:
        moved[thread] = set(cores)
        raise OSError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", note)
    threads = {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
    move_near(CARD, sysfs=sysfs(tmp_path, node="1", cores="8-15"))
    assert moved.keys() >= threads
    assert all(cores == set(range(8, 16)) for cores in moved.values())


def test_the_settings_are_made_without_torch() -> None:
    """The daemon of a node makes them, and starts quickly."""
    code = "import sys, headway.daemon.worker.card_host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
