"""Stand-ins for a cluster's processes: what is found and signalled are real processes of the same shape."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DAEMON = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "headway.daemon.worker"])
print(worker.pid, flush=True)
time.sleep(60)
"""
_CLUSTER = """
import subprocess, sys
store = sys.argv[1]
command = [sys.executable, "-c", {daemon!r}, "daemon", "--name=node-1", "--store-dir=" + store]
daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
etcd = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--listen-client-urls=x"])
print(daemon.pid, daemon.stdout.readline().strip(), etcd.pid, flush=True)
sys.stdin.read()
for child in (daemon, etcd):
    child.kill()
    child.wait()
"""


@contextmanager
def stand_ins(store: Path) -> Iterator[tuple[int, int, int, int]]:
    """Pids of a cluster's process, its one daemon, that one's worker, and etcd."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER.format(daemon=_DAEMON), str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    daemon, worker, etcd = map(int, process.stdout.readline().split())
    try:
        yield process.pid, daemon, worker, etcd
    finally:
        subprocess.run(["kill", "-KILL", str(worker)], check=False, capture_output=True)
        process.communicate()
