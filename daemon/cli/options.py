"""How a command is run: its options, which are fields of dataclasses, its cluster, and what it answers.

The text below a field is the option's help. Only names other than the field's, a metavar or limits need an annotation.
"""

import ast
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from headway.daemon.base.errors import ConfigError

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
    from headway.daemon.decide.cluster_view import ClusterView

ResultT = TypeVar("ResultT")

MOST_COLUMNS, LEAST_COLUMNS = 110, 52
"""Of help, which follows the terminal between them."""
MOST_OF_HELP = 200
"""Characters of a command's help in the list of commands."""

Answer = int | str | Iterable[str] | None
"""An exit code, or what is printed: a line, or several."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
JOB_FILE_HELP = 'A job file; the shortest: job.name = "first"'
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help=JOB_FILE_HELP)]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
Link = Literal["auto", "grpc", "collective"]
OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")]
EtcdBinary = Annotated[
    Path | None,
    typer.Option(help="The etcd binary (default: HEADWAY_ETCD_BINARY, then pip's, then PATH).", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster that a command talks to."""

    etcd: str | None = None
    """etcd members, HOST:PORT[,HOST:PORT…] (HEADWAY_ETCD). Without it: the local cluster."""
    certs: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem, for --etcd (HEADWAY_CERTS)."""
    cluster: Path | None = None
    """State folder of a local cluster (HEADWAY_CLUSTER; .headway)."""

    def find(self) -> "ClusterAddress":
        """Return its address. Raises ConfigError, StoreUnreachableError."""
        from headway.daemon.client import cluster_access

        return cluster_access.find_cluster(etcd=self.etcd, certs=self.certs, cluster=self.cluster)

    def view(self) -> "ClusterView":
        """Return what etcd has now."""
        return self.run(lambda session: session.view())

    def run(
        self,
        work: "Callable[[ClusterSession], Coroutine[Any, Any, ResultT]]",
        *,
        warns_of_end: bool = True,
        follows: str = "",
    ) -> ResultT:
        """Open a session, do the work in it, close the session.

        warns_of_end: says on stderr when the certificate ends soon. follows: the job that the work follows, which goes
        on after Ctrl-C, as a line on stderr then says.
        """
        import asyncio

        from headway.daemon.base import interrupts
        from headway.daemon.base.errors import StoreError
        from headway.daemon.client import cluster_access

        address = self.find()
        if warns_of_end and (line := address.certificate_end()):
            warn(line)

        async def warn_if_full(session: "ClusterSession") -> None:
            with suppress(StoreError):  # the work meets the same error
                if line := await session.why_full():
                    warn(line)

        async def run() -> ResultT:
            async with cluster_access.ClusterSession(address) as session:
                warning = asyncio.create_task(warn_if_full(session))
                try:
                    return await work(session)
                finally:
                    await asyncio.wait({warning})

        interrupts.end()
        try:
            return asyncio.run(run())
        except KeyboardInterrupt:
            if follows:
                warn(f"{follows} goes on without this command; `headway watch {follows}` shows it again")
            raise


class Panel(StrEnum):
    """The groups of commands in `headway --help`, in its order and under the titles of docs/commands.md."""

    HERE = "on this machine"
    LOOK = "look at a cluster"
    JOB = "act on a job"
    CLUSTER = "act on a cluster"
    SET_UP = "set up"


class Commands(Mapping[str, Any]):
    """Commands of the program or of a group, by name, each made when it is asked for.

    To make one reads the source of its options, and to make all of them takes longer than most commands run.
    """

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], Any]] = {}

    def add(self, name: str, maker: Callable[[], Any]) -> None:
        """Add a command under a name; `maker` is called at most once."""
        self._makers[name] = cache(maker)

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class CommandGroup(TyperGroup):
    """A group whose help lists its commands panel by panel."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write a section for each panel; commands of no panel come first."""
        found: dict[str, Any] = {name: command for name, command in self.commands.items() if not command.hidden}
        for panel in ("", *Panel):
            of_panel = [name for name, command in found.items() if (command.rich_help_panel or "") == panel]
            if of_panel:
                with formatter.section(panel.capitalize() or "Commands"):
                    formatter.write_dl([(name, _clause(found[name])) for name in of_panel])


def _clause(command: Any) -> str:
    """Return the beginning of a command's help, up to where it could end."""
    return re.split(r"[;:] ", command.get_short_help_str(MOST_OF_HELP))[0].removesuffix(".")


def _fitted(command: Any) -> Any:
    """Return a command whose examples and lists end where the terminal does: they are broken at spaces."""
    room = max(min(shutil.get_terminal_size().columns, MOST_COLUMNS), LEAST_COLUMNS) - 4
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(
        "\n".join(part for line in each.split("\n") for part in _broken(line, room)) if each.startswith("\b") else each
        for each in paragraphs
    )
    return command


def _broken(line: str, room: int) -> list[str]:
    """Return a line as several: each goes on below its last column, or as a shell's command."""
    last_column = max((found.end() for found in re.finditer(r"(?<=\S)  +", line)), default=0)
    is_command = not last_column and line.startswith("headway ")
    indent = " " * (last_column if 0 < last_column <= room // 2 else 4)
    parts = textwrap.wrap(
        line, room - 2 * is_command, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:] if is_command else parts or [line]


def add(
    commands: Commands, *functions: Callable[..., Answer], name: str | None = None, panel: Panel | None = None
) -> None:
    """Add commands, each under its own name, or one under another. panel: where `headway --help` lists them."""
    for function in functions:
        own = name or function.__name__.replace("_", "-")
        commands.add(own, partial(command_of, own, function, panel))


def add_group(
    commands: Commands,
    name: str,
    main: Callable[..., Answer],
    *,
    panel: Panel | None = None,
    is_command: bool = False,
    kind: type[TyperGroup] = CommandGroup,
) -> Commands:
    """Add a group of commands, and return what its commands are added to.

    is_command: `main` does something when no command follows its name.
    """
    members = Commands()
    settings = {"cls": kind, "invoke_without_command": is_command, "no_args_is_help": not is_command}
    commands.add(name, lambda: group_of(name, main, members, panel, **settings))
    return members


def group_of(
    name: str, main: Callable[..., Answer], members: Commands, panel: Panel | None = None, **settings: Any
) -> Any:
    """Return a group as typer runs it. settings: of typer.Typer."""
    app = _app(**{"cls": CommandGroup} | settings)
    app.callback()(_runnable(main))
    group: Any = _fitted(typer.main.get_command(app))
    group.name, group.commands, group.rich_help_panel = name, members, panel
    return group


def command_of(name: str, function: Callable[..., Answer], panel: Panel | None) -> Any:
    """Return a command as typer runs it."""
    app = _app()
    app.command(name, rich_help_panel=panel)(_runnable(function))
    return _fitted(typer.main.get_command(app))


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **{"add_completion": False} | settings)


def _runnable(command: Callable[..., Answer]) -> Callable[..., int | None]:
    """Return a command for typer: with an option for each field of its dataclasses, and its answer printed.

    One that answers in sentences gets --json here: its arguments, and the sentences under `answer`.
    """
    hints = get_type_hints(command, include_extras=True)
    is_told_in_sentences = "as_json" not in hints and hints.get("return", int) not in (int, type(None))
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(annotation=kind))
            continue
        options = _options_of(kind)
        groups[name] = kind, tuple(each.name for each in options)
        parameters += options
    if is_told_in_sentences:
        parameters.append(
            inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
        )

    @wraps(command)
    def run(**told: Any) -> int | None:
        for name, (kind, names) in groups.items():
            told[name] = kind(**{each: told.pop(each) for each in names})
        if not (is_told_in_sentences and told.pop("as_json")):
            return _said(command(**told))
        answer = command(**told)
        if isinstance(answer, int):
            return answer
        asked = {name: told[name] for name in told if name not in groups and isinstance(told[name], str | float | list)}
        say(as_json_text(asked | {"answer": [answer] if isinstance(answer, str) else [*(answer or ())]}))
        return None

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _options_of(kind: Any) -> list[inspect.Parameter]:
    """Return an option for each field of a dataclass; the text below the field is its help."""
    helps, hints, options = _texts_of_fields(kind), get_type_hints(kind, include_extras=True), []
    for item in fields(kind):
        hint: Any = hints[item.name]
        plain, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        info = copy(more[0]) if more else typer.Option()
        info.help, info.show_default = info.help or helps[item.name], item.default not in (None, "")
        if plain is bool and not item.default and not info.param_decls:
            info.param_decls = (f"--{item.name.replace('_', '-')}",)  # else there is a --no- as well
        annotation: Any = Annotated[plain, info]
        options.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation))
        if item.default is not MISSING:
            options[-1] = options[-1].replace(default=item.default)
    return options


def settings_options(kind: type, **more_flags: str) -> list[inspect.Parameter]:
    """Return an option for each field of a dataclass of settings; the text below the field is its help.

    None of them has a default: what is not given is left to the file and the environment. more_flags: further names of
    an option.
    """
    helps, options = _texts_of_fields(kind), []
    for name, told in get_type_hints(kind).items():
        plain = str if get_origin(told) is tuple else told
        flags = [f"--{name}", more_flags[name]] if name in more_flags else []
        annotation: Any = Annotated[plain | None, typer.Option(*flags, help=helps[name])]
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return options


@cache
def _texts_of_fields(kind: type) -> dict[str, str]:
    """Return the text that stands below each field in the source of a dataclass of a module."""
    classes = [each for each in _module_of(kind.__module__).body if isinstance(each, ast.ClassDef)]
    (definition,) = (each for each in classes if each.name == kind.__name__)
    found = {}
    for each, below in pairwise(definition.body):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and isinstance(below, ast.Expr):
            found[each.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


@cache
def _module_of(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def _said(answer: Answer) -> int | None:
    if answer is None or isinstance(answer, int):
        return answer
    for line in [answer] if isinstance(answer, str) else answer:
        say(line)
    return None


def say(text: str) -> None:
    """Print a line on stdout, for people or programs. Raises ConfigError, on a full disk for one."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise ConfigError(f"cannot be written: {error.strerror}", "stdout") from error


def warn(text: str) -> None:
    """Print a line on stderr, in the program's name."""
    sys.stderr.write(f"headway: {text}\n")


def as_json_text(value: object) -> str:
    """Return a value as one JSON document. A byte of a path that is no UTF-8 is `\\udcXX` in it."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), indent=2)
    return text


def draw_over(text: str, *, is_last: bool) -> None:
    """Draw a line of progress on stderr over the one before, if stderr is a terminal."""
    from headway.daemon.base.terminal import behind

    if sys.stderr.isatty():
        drawn = behind(sys.stderr)
        drawn.write(f"\r{text} " + "\n" * is_last)
        drawn.flush()


def show_sending(node: str, num_bytes: int, total_bytes: int) -> None:
    """Draw how much of the data a node has received."""
    draw_over(
        f"data to {node}: {num_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB", is_last=num_bytes == total_bytes
    )
