"""Memory that stays with the process, seen through the kernel's count of page faults."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headway.stages.stage.allocator import TUNABLES, with_large_pages

SCRIPT = """
import resource, sys
import torch
from headway.stages.stage.allocator import keep_freed_memory, release_freed_memory

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [torch.ones(1 << 20) for _ in range(8)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])

torch.set_num_threads(1)
assert keep_freed_memory()
num_faults()
again = num_faults()
kept = resident_pages()
release_freed_memory()
print(again, kept - resident_pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again_and_given_back_when_asked() -> None:
    """Eight tensors of 4 MiB, made and freed twenty times → hardly a page fault; then a release → pages go back."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    num_faults, num_released = map(int, done.stdout.split())
    assert num_faults < 100  # 20 × 8192 if each came fresh from the kernel
    assert num_released > 4096  # of the 32 MiB


PIECES = """
import resource
from headway.stages.stage.allocator import keep_freed_memory
if {is_kept}:
    assert keep_freed_memory(most_bytes={most_bytes}, growth_bytes=None)
for _ in range({num_pieces}):
    pieces = [b"x" * (1 << 20) for _ in range(4)]
    del pieces
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
PAGES_OF_ROUND = (4 << 20) // 4096


def more_page_faults(*, is_kept: bool, most_bytes: int = 64 << 20) -> int:
    """What forty rounds more cost, in each of which a process gets and frees four pieces of 1 MiB."""

    def page_faults(num_pieces: int) -> int:
        source = PIECES.format(is_kept=is_kept, most_bytes=most_bytes, num_pieces=num_pieces)
        found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
        return int(found.stdout)

    return page_faults(42) - page_faults(2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_pieces_of_a_transfer_get_the_pages_of_those_before() -> None:
    """As a daemon keeps it: forty rounds cost fewer pages than two; without it, most rounds get new ones."""
    assert more_page_faults(is_kept=True) < 2 * PAGES_OF_ROUND
    assert more_page_faults(is_kept=False) > 20 * PAGES_OF_ROUND


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_no_more_stays_than_was_asked_for() -> None:
    """At most half a piece at the end of the heap → every round gets new pages again."""
    assert more_page_faults(is_kept=True, most_bytes=512 << 10) > 20 * PAGES_OF_ROUND


def large_pages_kib(environment: dict[str, str]) -> int:
    """Of a process that fills eight blocks of 4 MiB."""
    source = """
from headway.stages.stage.allocator import keep_freed_memory
keep_freed_memory()
held = [b"x" * (4 << 20) for _ in range(8)]
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")))
"""
    command = [sys.executable, "-c", source]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return int(found.stdout)


def has_large_pages() -> bool:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return False
    return file.exists() and "[madvise]" in file.read_text()


@pytest.mark.skipif(not has_large_pages(), reason="no large pages for those who ask, or a C library that does not")
def test_the_heap_of_a_worker_lies_in_large_pages() -> None:
    """Told so by its environment: some of 32 MiB does; not told: none."""
    usual = {name: value for name, value in os.environ.items() if name != TUNABLES}
    assert large_pages_kib(usual) == 0
    assert large_pages_kib(usual | with_large_pages(usual)) > 0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", {TUNABLES: "glibc.malloc.hugetlb=1"}),
        ("glibc.malloc.arena_max=2", {TUNABLES: "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}),
        ("glibc.malloc.hugetlb=0", {}),
    ],
)
def test_what_glibc_is_told_already_stays(told: str, expected: dict[str, str]) -> None:
    """Nothing, another setting, and the opposite."""
    assert with_large_pages({TUNABLES: told} if told else {}) == expected
