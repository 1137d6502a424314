"""Memory that stays with the process, seen through the kernel's count of page faults."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from headway.stages.allocator import keep_freed_memory, release_freed_memory

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
