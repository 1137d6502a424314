"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

PIECES = """
import resource
from headway.daemon.node.kept_memory import keep_freed_memory
if {is_kept}:
    assert keep_freed_memory()
for _ in range({num_pieces}):
    pieces = [b"x" * (1 << 20) for _ in range(4)]
    del pieces
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
PAGES_OF_ROUND = (4 << 20) // 4096


def page_faults(*, is_kept: bool, num_pieces: int) -> int:
    """Of a process that gets and frees four pieces of 1 MiB, so many times."""
    source = PIECES.format(is_kept=is_kept, num_pieces=num_pieces)
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_pieces_of_a_transfer_get_the_pages_of_those_before() -> None:
    """Forty rounds more cost no more pages than two rounds have; without it, most rounds get new ones."""
    more = {
        is_kept: page_faults(is_kept=is_kept, num_pieces=42) - page_faults(is_kept=is_kept, num_pieces=2)
        for is_kept in (False, True)
    }
    assert more[True] < 2 * PAGES_OF_ROUND
    assert more[False] > 20 * PAGES_OF_ROUND
