"""What installs and removes the service of systemd: from the files that are there to actions, and their doing.

An action is what `--dry-run` prints and what is done otherwise, so the two cannot differ. Each may be done again, so a
call that broke off is completed by the next one. A second call finds everything in place and returns no action.
"""

import grp
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from headway.daemon.base.errors import ConfigError

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
class Run:
    """Run a command."""

    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"run {' '.join(self.command)}"


Action = Write | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is on the machine now."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of those files of LOOKED_AT that exist."""
    has_user: bool = False
    has_folder: bool = False
    """Whether any of FOLDER, STATE and DROP_INS exists."""
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
    wanted = _wanted(shipped, wish, facts)
    writes = [write for write in wanted if facts.files.get(write.path) != write.content]
    old = [path for path in (CUDA, HERE) if path in facts.files and path not in {write.path for write in wanted}]
    starts = wish.starts and not is_example(shipped, wish, facts)
    is_set_up = facts.has_user and facts.has_folder and facts.is_enabled and not facts.needs_reload
    if not writes and not old and is_set_up and (facts.is_running or not starts):
        return ()
    # The user must exist before a folder can belong to its group, and the folder before its files.
    first = [write for write in writes if write.path in (SYSUSERS, TMPFILES)]
    return (
        *first,
        Run(("systemd-sysusers", SYSUSERS)),
        Run(("systemd-tmpfiles", "--create", TMPFILES)),
        *(write for write in writes if write not in first),
        *(Run(("rm", "-f", path)) for path in old),
        Run(("systemctl", "daemon-reload")),
        Run(("systemctl", "enable", "headway")),
        *([Run(("systemctl", "start", "headway"))] if starts else []),
    )


def needs_restart(actions: Collection[Action], facts: Facts) -> bool:
    """Whether a running daemon still runs by the files of before."""
    changes = (action for action in actions if isinstance(action, Write) or action.command[0] == "rm")
    return facts.is_running and any(changes)


def is_example(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> bool:
    """Whether the node's settings are the example's, whose etcd does not exist."""
    return _settings(shipped, wish, facts) == shipped["daemon.toml"]


def uninstall_actions(facts: Facts, *, purge: bool) -> tuple[Action, ...]:
    """Return what removes the service. Settings, keys, state and user stay unless `purge`."""
    there = [path for path in (UNIT, CUDA, HERE, TMPFILES, SYSUSERS) if path in facts.files]
    actions: list[Action] = []
    if UNIT in there:
        # A clean leave: systemctl waits until the node's work has moved elsewhere.
        actions += [Run(("systemctl", "stop", "headway")), Run(("systemctl", "disable", "headway"))]
    if there:
        actions += [Run(("rm", "-f", *there)), Run(("sh", "-c", f"rmdir {DROP_INS} 2> /dev/null || true"))]
    if there or facts.needs_reload:
        actions.append(Run(("systemctl", "daemon-reload")))
    if purge and facts.has_folder:
        actions.append(Run(("rm", "-rf", FOLDER, STATE, DROP_INS)))
    if purge and facts.has_user:
        actions.append(Run(("userdel", USER)))
    return tuple(actions)


def out_of_sight(paths: Collection[str]) -> list[str]:
    """Which of these paths the unit cannot see, because it sees no home folders and has a /tmp of its own."""
    return [path for path in paths if _is_below(path, HIDDEN)]


def _settings(shipped: Mapping[str, bytes], wish: Wish, facts: Facts) -> bytes:
    return wish.settings if wish.settings is not None else facts.files.get(SETTINGS, shipped["daemon.toml"])


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


FILES = Path(__file__).resolve().parents[2] / "systemd"
"""In a checkout and in an installed wheel alike."""
BOOTED = Path("/run/systemd/system")
"""The folder by which sd_booted(3) tells that systemd runs this machine."""
COMMAND_TIMEOUT_S = 300.0
MAX_FILE_BYTES = 1 << 20


def check_machine() -> None:
    """Raise ConfigError unless this process may install a service here."""
    if not BOOTED.is_dir():
        raise ConfigError("systemd does not run this machine: start `headway daemon` by what does", "systemd")
    if os.geteuid() != 0:
        raise ConfigError("only root can install a service: run it with sudo, or see it first with --dry-run", "root")


def look() -> Facts:
    """Return what is there. Raises ConfigError for files that this user cannot read."""
    try:
        files = {path: Path(path).read_bytes() for path in LOOKED_AT if Path(path).is_file()}
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; run it as root", str(error.filename)) from error
    return Facts(
        files=files,
        has_user=any(user.pw_name == USER for user in pwd.getpwall()),
        has_folder=any(Path(path).is_dir() for path in (FOLDER, STATE, DROP_INS)),
        is_enabled=_asks("is-enabled"),
        is_running=_asks("is-active"),
        needs_reload=_asks("show", "--property=NeedDaemonReload", answer="NeedDaemonReload=yes"),
    )


def read_shipped() -> dict[str, bytes]:
    """Return the files of systemd/ that get installed, by their names there."""
    return {name: (FILES / name).read_bytes() for name in SHIPPED.values()}


def read_wish(
    *, config: Path | None, certificates: Path | None, writable: Collection[Path], cards: str, starts: bool
) -> Wish:
    """Return what is asked for. Raises ConfigError for a file that cannot be read, or a hidden program."""
    program = _program_folder()
    settings = None if config is None else _content(config)
    if settings is not None:
        _check_settings(settings, str(config))
    for folder in writable:
        if not folder.is_absolute() or out_of_sight([str(folder)]) or "\n" in str(folder):
            raise ConfigError("is not an absolute path that a service can see", str(folder))
    return Wish(
        program_folder=str(program),
        has_card=Path("/proc/driver/nvidia").is_dir() if cards == "auto" else cards == "yes",
        settings=settings,
        certificates={}
        if certificates is None
        else {name: _content(certificates / name) for name in CERTIFICATE_FILES},
        writable=tuple(map(str, writable)),
        starts=starts,
    )


def service_command(identity: str) -> str:
    """Return what makes the node of this machine a service, for people; empty: systemd does not run this machine.

    identity: the flags that name its settings and certificate.
    """
    if not BOOTED.is_dir():
        return ""
    try:
        # With its folder: sudo looks for programs in folders of its own.
        return f"sudo {shlex.quote(str(_program_folder() / 'headway'))} install {identity}"
    except ConfigError as error:
        return f"{error}, then `sudo {UNIT_PATH}/headway install {identity}`"


def _program_folder() -> Path:
    """Return the folder of the program. Raises ConfigError when a service cannot run it from there."""
    program = Path(sysconfig.get_path("scripts"))
    if not (program / "headway").is_file():
        raise ConfigError("has no program `headway`: install the wheel there first", str(program))
    of_program = {str(path) for path in (program, sys.prefix, sys.base_prefix, FILES)}
    if hidden := out_of_sight({*of_program, *(str(Path(path).resolve()) for path in of_program)}):
        raise ConfigError(
            "the service sees no home folders and no /tmp: install it in /opt/headway, with a Python for all users",
            min(hidden),
        )
    return program


def act(action: Action) -> None:
    """Do one action. Raises ConfigError with the first error of the system or the command."""
    try:
        if isinstance(action, Write):
            _write(action)
        else:
            _run(action.command)
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}", str(action)) from error


def _write(write: Write) -> None:
    """Replace a file in one step, so that a crash leaves the old one or the new one, and a draft that the next call
    replaces: it may be of a key.
    """
    path = Path(write.path)
    draft = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(write.content)
            os.fchown(file.fileno(), 0, grp.getgrnam(write.group).gr_gid)
            os.fchmod(file.fileno(), write.mode)
            os.fsync(file.fileno())
        draft.replace(path)
    except KeyError as error:
        raise ConfigError("does not exist: systemd-sysusers has not created it", f"group {write.group}") from error
    finally:
        draft.unlink(missing_ok=True)


def _run(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"did not end within {COMMAND_TIMEOUT_S:g} s", " ".join(command)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        hint = "; see journalctl -u headway" if "start" in command else ""
        raise ConfigError(f"{lines[0]}{hint}", " ".join(command))


def _asks(*question: str, answer: str = "") -> bool:
    """Ask systemctl one question about the unit, for its exit status or its answer; no where there is none."""
    if shutil.which("systemctl") is None:
        return False
    command = ["systemctl", *question, "headway"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S)
    return done.stdout.strip() == answer if answer else done.returncode == 0


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(path)) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"is larger than {MAX_FILE_BYTES} bytes", str(path))
    return content


def _check_settings(content: bytes, where: str) -> None:
    try:
        tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not TOML: {error}", where) from error
