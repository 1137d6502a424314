"""A process without a free file descriptor, and how many of them connections get."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headway.daemon.node.memory import NodeMemory
from headway.stages.sockets.open_files import MOST_CONNECTIONS, most_connections

LOW = 512


@contextmanager
def no_file_left() -> Iterator[None]:
    """Every file that this process may open is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_generations_are_written_when_no_file_can_be_opened(tmp_path: Path) -> None:
    """Somebody uses up all files of the daemon: what must be durable is written nevertheless, twice."""
    memory = NodeMemory(tmp_path)
    memory.open()
    with no_file_left():
        assert memory.saw_generations({"a": 1})
        assert memory.saw_generations({"a": 2})
    memory.close()
    again = NodeMemory(tmp_path)
    again.open()
    assert again.generations == {"a": 2}
    again.close()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """A process that is started with few files allows itself, and its children, what the system does."""
    script = (
        "import resource as r, subprocess as s, sys\n"
        "from headway.stages.sockets.open_files import raise_open_file_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 300))\n"
        "print(raise_open_file_limit(), r.getrlimit(r.RLIMIT_NOFILE))\n"
        "print(s.run(['sh', '-c', 'ulimit -n'], capture_output=True, text=True).stdout)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.split() == ["300", "(300,", "300)", "300"]


@pytest.mark.parametrize(("limit", "expected"), [(256, 128), (1024, 512), (20_000, MOST_CONNECTIONS), (1, 1)])
def test_connections_get_half_of_the_files(limit: int, expected: int) -> None:
    """The other half is for files, workers and the process's own connections."""
    assert most_connections(limit) == expected
