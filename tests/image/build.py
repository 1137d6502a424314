"""Builds the Dockerfile without a container engine: each stage in a throw-away overlay of this machine's root.

This machine stands for the base image, so its Python is of the same release. What an engine adds is not tried: its own
base, its layers, its network. Nothing of this machine is written.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PYTHON: Final = "/usr/bin/python3"
PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SHARED: Final = "/etc/headway"
"""The folder that a container is given, as on the page."""
HIDDEN: Final = ("/opt/headway", "/etc/headway", "/var/lib/headway")
"""What this machine may have of its own, and a base image has not."""
_ROOM = r"""
set -e
mount -t tmpfs tmpfs "$1"
stage() {
    mkdir -p "$room/$1/upper" "$room/$1/work" "$room/$1/root"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$room/$1/upper,workdir=$room/$1/work" "$room/$1/root"
    for each in $HIDDEN; do rm -rf "$room/$1/root$each"; done
    ln -sf "$PYTHON" "$room/$1/root/usr/local/bin/python"
    for each in proc dev sys; do mount --rbind "/$each" "$room/$1/root/$each"; done
}
room=$1; shared=$2
"""


def why_not() -> str:
    """Return what is missing here; empty if nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("unshare", "chroot") if shutil.which(name) is None]
    if missing:
        return f"needs {missing[0]}"
    ours = "import sys, ensurepip; print(sys.version_info[:2])"
    theirs = subprocess.run([PYTHON, "-c", ours], capture_output=True, text=True) if Path(PYTHON).exists() else None
    if theirs is None or theirs.stdout.strip() != str(tuple(sys.version_info[:2])):
        return f"needs {PYTHON} of the release of this Python, with ensurepip"
    return ""


@dataclass
class Stage:
    """What the instructions so far have set."""

    number: int
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    )
    folder: str = "/"
    user: str = "0:0"
    entry: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        """Its files, as the shell finds them."""
        return f'"$room/{self.number}/root"'

    def inside(self, command: str, extra: Mapping[str, str], *, user: str = "0:0") -> str:
        """Return the line that runs a shell's command inside."""
        told = " ".join(shlex.quote(f"{name}={value}") for name, value in {**self.environment, **extra}.items())
        within = shlex.quote(f"cd {shlex.quote(self.folder)}; {command}")
        return f"chroot --userspec={user} {self.root} env -i {told} sh -ec {within}"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile with the rest of its line."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


class Image:
    """`script` builds the image and then starts a command in it as an engine would."""

    def __init__(self, arguments: Mapping[str, str], outside: Mapping[str, str]) -> None:
        """arguments: as of --build-arg. outside: what an engine hands to each step, such as proxies."""
        self._arguments, self._outside = dict(arguments), dict(outside)
        self._names: dict[str, Stage] = {}
        self._stages: list[Stage] = []
        self._lines = [_ROOM]
        for word, rest in instructions((ROOT / "Dockerfile").read_text()):
            act: Any = getattr(self, f"_{word.lower()}")
            act(rest)

    @property
    def last(self) -> Stage:
        """The stage that becomes the image."""
        return self._stages[-1]

    def script(self, *command: str) -> str:
        """Return a shell script for a private mount namespace: its arguments are an empty folder, and SHARED's."""
        stage = self.last
        told = shlex.join([*stage.entry, *(command or stage.command)])
        mounted = f'mkdir -p {stage.root}{SHARED}; mount --bind "$shared" {stage.root}{SHARED}'
        return "\n".join([*self._lines, mounted, "exec " + stage.inside(f"exec {told}", {}, user=stage.user)])

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self._arguments.setdefault(name, value)

    def _from(self, rest: str) -> None:
        self._stages.append(Stage(len(self._stages)))
        self._names[rest.partition(" AS ")[2] or str(self.last.number)] = self.last
        self._lines.append(f"stage {self.last.number}")

    def _env(self, rest: str) -> None:
        for name, value in (each.split("=", 1) for each in shlex.split(rest)):
            self.last.environment[name] = re.sub(r"\$(\w+)", lambda known: self.last.environment[known[1]], value)

    def _workdir(self, rest: str) -> None:
        self.last.folder = rest
        self._lines.append(f"mkdir -p {self.last.root}{rest}")

    def _copy(self, rest: str) -> None:
        *files, target = shlex.split(rest)
        root = shlex.quote(str(ROOT))
        if files[0].startswith("--from="):
            root = self._names[files.pop(0).removeprefix("--from=")].root
        path = self.last.root + str(Path(self.last.folder, target))
        for name in files:
            each = f"{root}/{name.lstrip('/')}"
            self._lines.append(f"if [ -d {each} ]; then mkdir -p {path}; fi")
            self._lines.append(f"if [ -d {each} ]; then cp -a {each}/. {path}; else cp {each} {path}; fi")

    def _run(self, rest: str) -> None:
        self._lines.append(self.last.inside(rest, {**self._arguments, **self._outside}))

    def _user(self, rest: str) -> None:
        self.last.user = rest

    def _volume(self, rest: str) -> None:
        self._lines.append(f"test -d {self.last.root}{rest}")

    def _stopsignal(self, rest: str) -> None:
        assert rest == "SIGTERM"

    def _entrypoint(self, rest: str) -> None:
        self.last.entry = tuple(json.loads(rest))

    def _cmd(self, rest: str) -> None:
        self.last.command = tuple(json.loads(rest))
