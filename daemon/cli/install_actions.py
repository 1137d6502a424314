"""What installs and removes the service. Pure: from the files that are there to the list of actions.

An action is what `--dry-run` prints and what is done otherwise, so the two cannot differ. A second call with the same
wish finds everything in place and returns no action.
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

UNIT: Final = "/etc/systemd/system/headway.service"
DROP_INS: Final = "/etc/systemd/system/headway.service.d"
CUDA: Final = f"{DROP_INS}/cuda.conf"
HERE: Final = f"{DROP_INS}/here.conf"
SYSUSERS: Final = "/etc/sysusers.d/headway.conf"
TMPFILES: Final = "/etc/tmpfiles.d/headway.conf"
FOLDER: Final = "/etc/headway"
SETTINGS: Final = f"{FOLDER}/daemon.toml"
ENVIRONMENT: Final = f"{FOLDER}/headway.env"
CERTIFICATES: Final = f"{FOLDER}/certificates"
CERTIFICATE_FILES: Final = ("ca.pem", "cert.pem", "key.pem")
STATE: Final = "/var/lib/headway"
USER: Final = "headway"

SHIPPED: Final = {
    UNIT: "headway.service",
    CUDA: "headway.service.d/cuda.conf",
    SYSUSERS: "headway.sysusers",
    TMPFILES: "headway.tmpfiles",
    SETTINGS: "daemon.toml",
    ENVIRONMENT: "headway.env",
}
"""Where each file of the folder systemd/ goes."""

LOOKED_AT: Final = (*SHIPPED, HERE, *(f"{CERTIFICATES}/{name}" for name in CERTIFICATE_FILES))
"""The files that may be written."""

HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome and PrivateTmp hide from the unit."""
OPEN: Final = (STATE, "/dev/shm", "/run/headway")
"""What the unit may write without a drop-in."""
FOLDER_KEYS: Final = ("state_dir", "store_dir", "cache_dir", "history_dir", "checkpoint_root")
UNIT_PATH: Final = "/opt/headway/bin"
"""The program's folder that the shipped unit names."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write a file; only root and its group may read it, unless the mode says more."""

    path: str
    content: bytes
    mode: int = 0o644
    group: str = "root"

    def __str__(self) -> str:
        return f"write {self.path} (mode {self.mode:04o}, group {self.group})"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a file, or a folder with all that it holds. A missing one is fine."""

    path: str

    def __str__(self) -> str:
        return f"delete {self.path}"


@dataclass(frozen=True, slots=True)
class DeleteIfEmpty:
    """Delete a folder if nothing of somebody else's is in it."""

    path: str

    def __str__(self) -> str:
        return f"delete {self.path} if it is empty"


@dataclass(frozen=True, slots=True)
class Run:
    """Run a command."""

    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"run {' '.join(self.command)}"


Action = Write | Delete | DeleteIfEmpty | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is on the machine now."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of those files of LOOKED_AT that exist."""
    folders: Collection[str] = ()
    """Those of FOLDER, STATE and DROP_INS that exist."""
    has_user: bool = False
    is_enabled: bool = False
    is_running: bool = False
    needs_reload: bool = False
    """Whether systemd has not read the unit's files since they changed, as after an installation that broke off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for."""

    program_folder: str
    """The folder of the program `headway`."""
    has_card: bool = False
    settings: bytes | None = None
    """The node's settings; None: those that are there, else the example."""
    certificates: Mapping[str, bytes] = field(default_factory=dict)
    """Name of a file to its content; empty: those that are there."""
    writable: tuple[str, ...] = ()
    """Folders outside of the unit's own that it may write, such as that of checkpoints."""
    starts: bool = True


def install_actions(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> tuple[Action, ...]:
    """Return what is left to do. shipped: the files of systemd/ by name."""
    writes = [write for write in _wanted(shipped, wish, facts) if facts.files.get(write.path) != write.content]
    written = {write.path for write in writes}
    actions: list[Action] = [write for write in writes if write.path in (SYSUSERS, TMPFILES)]
    # The user must exist before a folder can belong to its group, and the folder before its files.
    if SYSUSERS in written or not facts.has_user:
        actions.append(Run(("systemd-sysusers", SYSUSERS)))
    if TMPFILES in written or FOLDER not in facts.folders:
        actions.append(Run(("systemd-tmpfiles", "--create", TMPFILES)))
    actions += [write for write in writes if write.path not in (SYSUSERS, TMPFILES)]
    old = [path for path in (CUDA, HERE) if path in facts.files and path not in _names(shipped, wish, facts)]
    actions += [Delete(path) for path in old]
    if old or facts.needs_reload or any(path.startswith((UNIT, DROP_INS)) for path in written):
        actions.append(Run(("systemctl", "daemon-reload")))
    if not facts.is_enabled:
        actions.append(Run(("systemctl", "enable", "headway")))
    if not facts.is_running and wish.starts and not is_example(shipped, wish, facts):
        actions.append(Run(("systemctl", "start", "headway")))
    return tuple(actions)


def needs_restart(actions: Collection[Action], facts: Facts) -> bool:
    """Whether a running daemon still runs by the files of before."""
    return facts.is_running and any(isinstance(action, (Write, Delete)) for action in actions)


def is_example(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> bool:
    """Whether the node's settings are the example's, whose etcd does not exist."""
    return _settings(shipped, wish, facts) == shipped["daemon.toml"]


def uninstall_actions(facts: Facts, *, purge: bool) -> tuple[Action, ...]:
    """Return what removes the service. Settings, keys, state and user stay unless `purge`."""
    actions: list[Action] = []
    if facts.is_running:
        # A clean leave: systemctl waits until the node's work has moved elsewhere.
        actions.append(Run(("systemctl", "stop", "headway")))
    if facts.is_enabled:
        actions.append(Run(("systemctl", "disable", "headway")))
    units = [path for path in (UNIT, CUDA, HERE) if path in facts.files]
    actions += [Delete(path) for path in units]
    if DROP_INS in facts.folders:
        actions.append(Delete(DROP_INS) if purge else DeleteIfEmpty(DROP_INS))
    actions += [Delete(path) for path in (TMPFILES, SYSUSERS) if path in facts.files]
    if units or facts.needs_reload:
        actions.append(Run(("systemctl", "daemon-reload")))
    if purge:
        actions += [Delete(path) for path in (FOLDER, STATE) if path in facts.folders]
        if facts.has_user:
            actions.append(Run(("userdel", USER)))
    return tuple(actions)


def out_of_sight(paths: Collection[str]) -> list[str]:
    """Which of these paths the unit cannot see, because it sees no home folders and has a /tmp of its own."""
    return [path for path in paths if _is_below(path, HIDDEN)]


def _settings(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> bytes:
    return wish.settings if wish.settings is not None else facts.files.get(SETTINGS, shipped["daemon.toml"])


def _names(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> set[str]:
    return {write.path for write in _wanted(shipped, wish, facts)}


def _wanted(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> list[Write]:
    """Return every file as it should be, in the order of writing."""
    settings = _settings(shipped, wish, facts)
    wanted = [Write(path, shipped[SHIPPED[path]]) for path in (SYSUSERS, TMPFILES)]
    wanted.append(Write(SETTINGS, settings, 0o640, USER))
    # Written once: what the administrator puts there is kept.
    environment = facts.files.get(ENVIRONMENT, shipped[SHIPPED[ENVIRONMENT]])
    wanted.append(Write(ENVIRONMENT, environment, 0o600))
    wanted += [Write(f"{CERTIFICATES}/{name}", wish.certificates[name], 0o640, USER) for name in wish.certificates]
    wanted.append(Write(UNIT, shipped[SHIPPED[UNIT]]))
    if wish.has_card:
        wanted.append(Write(CUDA, shipped[SHIPPED[CUDA]]))
    if here := _here(wish, settings, facts.files.get(HERE, b"")):
        wanted.append(Write(HERE, here))
    return wanted


def _here(wish: Wish, settings: bytes, old: bytes) -> bytes:
    """Return the drop-in with what differs on this machine; nothing if nothing does. old: the drop-in of before."""
    lines = []
    if wish.program_folder != UNIT_PATH:
        lines.append(f'Environment="PATH={_quoted(wish.program_folder)}:/usr/local/bin:/usr/bin:/bin"')
    # With the - a folder that is not mounted yet does not keep the node from starting.
    folders = {path for path in (*wish.writable, *_folders(settings)) if not _is_below(path, OPEN)}
    granted = {line for line in old.decode(errors="replace").splitlines() if line.startswith("ReadWritePaths=")}
    lines += sorted(granted | {f'ReadWritePaths="-{_quoted(path)}"' for path in folders})
    if not lines:
        return b""
    return "".join(f"{line}\n" for line in ("# Written by `headway install`.", "[Service]", *lines)).encode()


def _folders(settings: bytes) -> list[str]:
    """Return the absolute folders that a node's settings name."""
    told = tomllib.loads(settings.decode())
    return [path for key in FOLDER_KEYS if isinstance(path := told.get(key), str) and path.startswith("/")]


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def _quoted(path: str) -> str:
    """Return a path for the inside of a quoted value of a unit file."""
    return path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
