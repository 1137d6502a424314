"""The machine that gets the service: what is there, and doing the actions."""

import grp
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Collection
from pathlib import Path

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.install_actions import (
    CERTIFICATE_FILES,
    DROP_INS,
    FOLDER,
    LOOKED_AT,
    SHIPPED,
    STATE,
    UNIT_PATH,
    USER,
    Action,
    Delete,
    DeleteIfEmpty,
    Facts,
    Run,
    Wish,
    Write,
    out_of_sight,
)

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
        folders = [path for path in (FOLDER, STATE, DROP_INS) if Path(path).is_dir()]
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; run it as root", str(error.filename)) from error
    return Facts(
        files=files,
        folders=folders,
        has_user=_has_user(),
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
        match action:
            case Write():
                _write(action)
            case Delete(path):
                _delete(Path(path))
            case DeleteIfEmpty(path):
                if Path(path).is_dir() and not any(Path(path).iterdir()):
                    Path(path).rmdir()
            case Run(command):
                _run(command)
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


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


def _has_user() -> bool:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return False
    return True


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
