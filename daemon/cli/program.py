"""The command line. Only what `--help` needs is imported here; each command imports the rest when it runs."""

import importlib.metadata
import os
import re
import sys
from typing import Annotated, Any

import typer

from headway.daemon.base.errors import (
    EXIT_CONFIG,
    EXIT_JOB_FAILED,
    EXIT_UNREACHABLE,
    ConfigError,
    ConflictError,
    JobFailedError,
    RecoveryError,
    StoreError,
)
from headway.daemon.base.terminal import printable_streams
from headway.daemon.cli import certificates, chaos, cluster, data, examples, jobs, local, submission
from headway.daemon.cli.options import MOST_COLUMNS, Commands, group_of
from headway.stages.errors import CompilationError, DataError, KernelError, MissingPackageError, PeerError
from headway.stages.sockets.tls_sentences import sentence_of

EXIT_INTERRUPTED = 130

_ClickError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""click's base class of usage errors; its place depends on the version of typer."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(importlib.metadata.version("headway"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model as a pipeline across machines that differ, come and go.

    \b
    headway demo                              train a small model on a cluster on this machine
    headway run JOB.toml --nodes 3 --out DIR  start a cluster for one job
    headway up --nodes 3                      start a cluster that stays, for `submit`, `watch`, …

    Exit codes: 2 usage or configuration, 3 unreachable, 4 job failed.
    """


def program() -> Any:
    """Return the program as typer runs it."""
    commands = Commands()
    for module in (examples, local, jobs, submission, cluster, certificates, chaos, data):
        module.register(commands)
    context = {"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS}
    return group_of("headway", _root, commands, no_args_is_help=True, add_completion=True, context_settings=context)


def run(arguments: list[str]) -> int:
    """Run one command line; return the exit code. Control characters in foreign texts never reach the terminal."""
    with printable_streams():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        result = program().main(arguments, prog_name="headway", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # so that the flush at exit does not raise on the broken pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        code = _exit_code(error)
        if code is None and (package := _missing_package(error) or _unfit_package()):
            sys.stderr.write(f"headway: {package}\n")
            return EXIT_CONFIG
        if code is None or os.environ.get("HEADWAY_DEBUG"):
            raise
        is_help = type(error).__name__ == "NoArgsIsHelpError"  # a group without a command: its help is the message
        sys.stderr.write(f"{error}\n" if is_help else f"headway: {_sentence(error)}\n")
        return code


def _missing_package(error: Exception) -> str:
    """Return which extra of headway brings the package that is not installed; empty: the error is another one."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in ("", "headway"):
        return ""
    extra = re.compile(rf"{re.escape(missing)}\b[^;]*;.*extra == ['\"]([\w-]+)")
    found = next(filter(None, map(extra.match, importlib.metadata.requires("headway") or ())), None)
    return str(MissingPackageError(missing, found[1], "this command")) if found else ""


def _unfit_package() -> str:
    """Return which package that headway needs was replaced by another release; empty: none. Generated code of gRPC and
    protobuf, for one, refuses an older release.
    """
    for needed in importlib.metadata.requires("headway") or ():
        wanted, _, condition = needed.partition(";")
        bounds = {sign: _release(text) for sign, text in re.findall(r"(>=|<)([0-9.]+)", wanted)}
        name = re.split(r"[<>=]", wanted)[0].strip()
        if not bounds or (condition and "node" not in condition):
            continue  # what only some other extra needs is not to blame
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if condition:  # of an extra
                continue
            return f"{name} is not installed: pip install '{wanted.strip()}'"
        is_old = _release(found) < bounds.get(">=", ())
        if is_old or ("<" in bounds and _release(found) >= bounds["<"]):
            return f"{name} {found} is installed, and headway needs another release: pip install '{wanted.strip()}'"
    return ""


def _release(text: str) -> tuple[int, ...]:
    """Return `7.35.1+cpu` as (7, 35, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an expected error; None: the error is our bug."""
    if isinstance(error, (ConfigError, DataError, CompilationError, KernelError, MissingPackageError, _ClickError)):
        return EXIT_CONFIG
    if isinstance(error, JobFailedError):
        return EXIT_JOB_FAILED
    if isinstance(error, (StoreError, PeerError, RecoveryError, ConflictError, TimeoutError)):
        return EXIT_UNREACHABLE
    return None


def _sentence(error: Exception) -> str:
    """Return an error on one line."""
    if isinstance(error, _ClickError):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        # "Value error, " is a word of the library that reads a choice of texts.
        text = error.format_message().replace("Value error, ", "") + hint  # type: ignore[attr-defined]
    else:
        text = str(error)
    return _without_tls_jargon(" ".join(text.split()))


def _without_tls_jargon(text: str) -> str:
    """Replace gRPC's words for a failed handshake by ours; keep the peer's name in front."""
    sentence = sentence_of(text)
    if sentence is None:
        return text
    peer = text.split(": ", 1)[0]
    return f"{peer}: {sentence.meaning}; {sentence.advice}"
