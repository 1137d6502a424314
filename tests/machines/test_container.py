"""A container's life, made of namespaces and a cgroup: the first commands of the README work in it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SMALL: Final = ROOT / "docs/jobs/small.toml"
CGROUPS: Final = (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")
SHARD: Final = "model/model-00001-of-00001.safetensors"
PROXIES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
CONTAINER: Final = r"""
set -e
room=$1; hidden=$2; group=$3; shift 3
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$room"
# Python may lie below a folder that other users cannot enter.
if [ -n "$hidden" ]; then
    python=$(dirname "$(dirname "$(readlink -f "$1")")")
    mkdir "$room/python" && mount --bind "$python" "$room/python"
    mount -t tmpfs -o mode=755 tmpfs "$hidden"
    mkdir -p "$python" && mount --move "$room/python" "$python"
fi
[ -z "$group" ] || echo $$ > "$group/cgroup.procs"
mount --bind / / && mount -o remount,bind,ro /
cd "$room"
umask 077
ulimit -n 256
exec setpriv --reuid 12345 --regid 12345 --clear-groups env -u HOME -u USER -u LOGNAME "$@" <&-
"""


@pytest.fixture
def group() -> Iterator[str]:
    """A cgroup of 2 GiB; empty where none can be made."""
    folder, setting = next((each for each in CGROUPS if (each[0] / "cgroup.procs").exists()), CGROUPS[-1])
    made = folder / f"headway-{os.getpid()}"
    try:
        made.mkdir()
        (made / setting).write_text(str(2 << 30))
    except OSError:
        with suppress(OSError):
            made.rmdir()
        yield ""
        return
    yield str(made)
    made.rmdir()


@pytest.mark.timeout(320)
def test_the_first_commands_work_in_a_container(tmp_path: Path, group: str) -> None:
    """2 GiB, 64 MB of /dev/shm, a proxy that nobody serves, a read-only root, a user without a name, home or stdin."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("needs root, unshare and setpriv")
    python = Path(sys.executable).resolve()
    closed = [folder for folder in reversed(python.parents) if not folder.stat().st_mode & 1]
    if any(not folder.stat().st_mode & 1 for folder in (ROOT, *ROOT.parents)):
        pytest.skip(f"another user cannot enter {ROOT}")
    room = Path("/tmp") / f"hwc-{os.getpid()}"
    room.mkdir()
    environment = os.environ | dict.fromkeys(PROXIES, "http://127.0.0.1:9") | {"TERM": "dumb", "TMPDIR": str(room)}
    headway = f"{sys.executable} -m headway.daemon.cli.main"
    commands = (
        f"set -e; {headway} --help; {headway} doctor; {headway} run {SMALL} --nodes 2 --out piped; "
        f"{headway} reference {SMALL} --out plain; cmp plain/{SHARD} piped/{SHARD}; "
        f"{headway} up --nodes 2 >up & up=$!; until grep -q ' up; etcd at ' up; do sleep 0.1; kill -0 $up; done; "
        f"{headway} nodes; kill $up; wait $up; echo same bits"
    )
    inside = ["sh", "-c", CONTAINER, "sh", str(room), str(closed[0]) if closed else "", group, sys.executable]
    try:
        done = subprocess.run(
            ["unshare", "-m", *inside, "-c", f"import os; os.execvp('sh', ['sh', '-c', {commands!r}])"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        room.rmdir()
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["same bits"]), done.stdout + done.stderr
    assert "2.0 GiB by a cgroup's limit" in done.stdout or not group
    assert "small for this memory: they go to the state folder" in done.stdout
    assert "note  web proxy: http_proxy" in done.stdout
    assert "node-2  127.0.0.1:" in done.stdout
