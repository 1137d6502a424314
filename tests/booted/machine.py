"""A machine that systemd runs: systemd-nspawn over a throw-away overlay of this machine's root.

Nothing of this machine is written: changes lie in a tmpfs of a mount namespace of its own, and vanish with it. The
machine has no network but its loopback. Commands run inside by nsenter, because no bus leads in from outside.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

BOOT_TIMEOUT_S: Final = 60.0
COMMAND_TIMEOUT_S: Final = 600.0
PYTHON: Final = "/usr/bin/python3"
"""The machine's own Python: a service sees no home folders, where other Pythons often lie."""
PACKAGES: Final = "/srv/packages"
SHARED: Final = "/srv/shared"
MASKED: Final = ("etcd", "systemd-networkd", "systemd-resolved", "systemd-timesyncd", "networking", "ssh", "cron")

_PREPARE = r"""
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
root=$1/root; shift
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/headway* "$root"/etc/headway "$root"/opt/headway
ln -sf /lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
: > "$root/etc/fstab"; : > "$root/etc/machine-id"; echo booted > "$root/etc/hostname"
echo '127.0.0.1 localhost booted' > "$root/etc/hosts"
for unit in $MASKED; do ln -sf /dev/null "$root/etc/systemd/system/$unit.service"; done
for unit in getty.target console-getty.service timers.target; do ln -sf /dev/null "$root/etc/systemd/system/$unit"; done
exec systemd-nspawn --quiet --directory="$root" --boot --private-network --register=no --keep-unit --console=pipe \
    --kill-signal=SIGRTMIN+3 "$@"
"""


def why_not() -> str:
    """Return what is missing for such a machine here; empty if nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("systemd-nspawn", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {missing[0]} (Debian: systemd-container)"
    ours = "import sys; print(sys.version_info[:2])"
    theirs = subprocess.run([PYTHON, "-c", ours], capture_output=True, text=True) if Path(PYTHON).exists() else None
    if theirs is None or theirs.stdout.strip() != str(tuple(sys.version_info[:2])):
        return f"needs {PYTHON} of the release of this Python, whose packages it shares"
    return ""


class Machine:
    """A context manager: inside, the machine is up."""

    def __init__(self, folder: Path, packages: Path) -> None:
        self.shared = folder / "shared"
        """Seen inside as SHARED."""
        self.shared.mkdir(parents=True)
        self._root, self._log = folder / "root", folder / "console.log"
        self._root.mkdir()
        self._packages = packages
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    def __enter__(self) -> Self:
        name = f"headway-{os.getpid()}"
        binds = [f"--bind={self.shared}:{SHARED}", f"--bind-ro={self._packages}:{PACKAGES}", f"--machine={name}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", _PREPARE, "sh", str(self._root), *binds],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "MASKED": " ".join(MASKED), "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        try:
            self.until(self._is_up, "the machine is up", within_s=BOOT_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        if self._init:
            os.kill(self._init, signal.SIGRTMIN + 4)  # systemd's signal to power off
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in (self._init, process.pid):
                if pid:
                    os.kill(pid, signal.SIGKILL)
            process.wait(20)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command inside; return stdout and stderr. Fails when the command does, unless check is false."""
        inside = ["nsenter", "--target", str(self._init), "--all", "--", *command]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            inside,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            env={"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"},
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}"
        return done.stdout

    def show(self, unit: str, key: str) -> str:
        """Return one property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={key}", "--value").strip()

    def until(self, claim: Callable[[], object], what: str, *, within_s: float = 60.0) -> float:
        """Wait for a claim; return the seconds that it took."""
        began = time.monotonic()
        while not claim():
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
            assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
            time.sleep(0.05)
        return time.monotonic() - began

    def _is_up(self) -> bool:
        if not self._init:
            self._init = self._find_init()
        if not self._init:
            return False
        return self.run("systemctl", "is-system-running", check=False).strip() in ("running", "degraded")

    def _find_init(self) -> int:
        """Return the process that is number 1 inside, as this machine numbers it; 0 before there is one."""
        assert self._process is not None
        children = [self._process.pid]
        for parent in children:
            try:
                numbers = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
                status = Path(f"/proc/{parent}/status").read_text()
            except OSError:
                continue
            children += map(int, numbers)
            inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(inner) > 1 and inner[-1] == "1":
                return parent
        return 0
