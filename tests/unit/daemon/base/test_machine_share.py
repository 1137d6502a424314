"""How much of the machine a container leaves a process, by the files of a kernel that tests write."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.daemon.base import machine_share
from headway.daemon.base.machine_share import folder_in_memory, memory_limit_bytes, num_cores, num_memory_kills
from headway.daemon.node.settings import NodeConfig

GIB = 1 << 30
V2 = "30 20 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "31 20 0:27 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 20 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may run on four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def kernel(root: Path, own: str, mounts: str, **settings: str) -> Path:
    """Write what a kernel shows; settings: texts by path below /sys/fs/cgroup."""
    shown = {"proc/self/cgroup": own, "proc/self/mountinfo": f"20 1 8:1 / / rw - ext4 /dev/a rw\n{mounts}"}
    shown |= {f"sys/fs/cgroup/{path}": text for path, text in settings.items()}
    for path, text in shown.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


def test_the_least_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    """cgroups 2: a service without a limit of its own, in a slice that has one; a slice beside it counts for nobody."""
    settings = {
        "own.slice/me.service/memory.max": "max",
        "own.slice/me.service/cpu.max": "max 100000",
        "own.slice/me.service/memory.events": "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0",
        "own.slice/memory.events": "oom 5\noom_kill 4",
        "own.slice/memory.max": str(3 * GIB),
        "own.slice/cpu.max": "150000 100000",
        "other.slice/memory.max": str(GIB),
    }
    root = kernel(tmp_path, "0::/own.slice/me.service", V2.format(top="/"), **settings)
    assert (memory_limit_bytes(root), num_cores(root)) == (3 * GIB, 1.5)
    assert num_memory_kills(root) == 2


@pytest.mark.parametrize(("own", "top"), [("0::/", "/"), ("0::/docker/a1", "/docker/a1"), ("0::/../b2", "/")])
def test_a_container_sees_its_group_at_the_top(tmp_path: Path, own: str, top: str) -> None:
    """With a namespace of cgroups, without one, and where the namespace began elsewhere."""
    root = kernel(tmp_path, own, V2.format(top=top), **{"memory.max": str(2 * GIB), "cpu.max": "50000 100000"})
    assert (memory_limit_bytes(root), num_cores(root)) == (2 * GIB, 0.5)


def test_a_container_of_cgroups_1(tmp_path: Path) -> None:
    """Each controller has a folder of its own; the whole machine's group says a number that is no limit."""
    own = "5:cpu,cpuacct:/docker/a1\n4:memory:/docker/a1\n0::/"
    settings = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/docker/a1/memory.limit_in_bytes": str(2 * GIB),
        "memory/docker/a1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7",
        "cpu,cpuacct/docker/a1/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/docker/a1/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = kernel(tmp_path, own, V1.format(top="/"), **settings)
    assert (memory_limit_bytes(root), num_cores(root)) == (2 * GIB, 2.5)
    assert num_memory_kills(root) == 7


def test_no_limit_is_seen_where_there_is_none(tmp_path: Path) -> None:
    """No proc at all, and groups without settings: the machine's own memory and cores."""
    assert (memory_limit_bytes(tmp_path), num_cores(tmp_path)) == (None, 4.0)
    root = kernel(tmp_path, "0::/", V2.format(top="/"))
    assert (memory_limit_bytes(root), num_cores(root), num_memory_kills(root)) == (None, 4.0, 0)


@pytest.mark.parametrize(("part", "is_taken"), [(0.5, True), (0.25, True), (0.01, False)])
def test_a_folder_in_memory_has_to_hold_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float, is_taken: bool
) -> None:
    """That of a machine holds half of its memory; 64 MB of a container do not hold a snapshot: its disk is taken."""
    usage = SimpleNamespace(total=part * machine_share.memory_bytes())
    monkeypatch.setattr(machine_share, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert folder_in_memory() == (tmp_path if is_taken else None)
    in_state = NodeConfig(state_dir=tmp_path / "state").layer_store_dir == tmp_path / "state" / "store"
    assert in_state is not is_taken
