"""`headway init`: files to begin with, a job of its own name or one of the examples that come with Headway."""

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Final

import typer

from headway.daemon.base.addresses import JOB_NAME_RULE, is_job_name
from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.options import Answer, Commands, Panel, add

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
"""In a checkout and in an installed wheel alike, which has these two folders of it."""
FOLDERS: Final = ("jobs", "examples")


def register(app: Commands) -> None:
    """Add the command."""
    add(app, init, panel=Panel.HERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Which file is written."""

    model: Annotated[str | None, typer.Option("--from", metavar="MODEL")] = None
    """Adapters beside this model: its folder, or a URL such as hf://Qwen/Qwen3-8B."""
    example: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write this file of the examples that come with Headway, as it is."""


def init(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the job; its file is NAME.toml.")] = "first",
    *,
    options: InitOptions,
) -> Answer:
    """Write a commented job file to begin with, and say what to type next. A file that is there stays.

    \b
    headway init my-job
    headway init tuned --from hf://Qwen/Qwen3-8B
    headway init small --example small
    headway init notebook --example notebook.ipynb
    """
    if options.example is not None:
        if options.model is not None:
            raise ConfigError("excludes --from: an example is written as it is", "--example")
        return write_example(name, options.example)
    return write_job(name, model=options.model)


def examples() -> dict[str, Path]:
    """Return all examples by their file names."""
    return {path.name: path for folder in FOLDERS for path in sorted((DOCS / folder).iterdir()) if path.is_file()}


def write_example(name: str, example: str) -> list[str]:
    """Write an example under a name and its own ending; return what was written. Raises ConfigError."""
    known = examples()
    found = known.get(example) or known.get(f"{example}.toml")
    if found is None:
        raise ConfigError(f"no example is named {example!r}; there are {', '.join(known)}", "--example")
    path = Path(name if Path(name).suffix else f"{name}{found.suffix}")
    _write(path, found.read_text(encoding="utf-8"))
    return [f"{path}: {found.name}, as it comes with Headway"]


def write_job(name: str, *, model: str | None) -> list[str]:
    """Write NAME.toml, a job that trains at once, or adapters beside a model; return it, and what to type next.

    Raises ConfigError for a name that no job can have, and for a file that is there.
    """
    path = Path(name if name.endswith(".toml") else f"{name}.toml")
    job = path.stem
    if not is_job_name(job):
        raise ConfigError(f"{job!r} cannot be the name of a job: {JOB_NAME_RULE}", "NAME")
    template = "first" if model is None else "tuned"
    text = examples()[f"{template}.toml"].read_text(encoding="utf-8")
    text = text.replace(f'name = "{template}"', f'name = "{job}"')
    if model is not None:
        if not model.isprintable():
            raise ConfigError(f"{model!r} has characters that cannot be printed", "--from")
        text = text.replace('from = "Qwen3-8B"  ', f"from = {json.dumps(model, ensure_ascii=False)}  ")
    _write(path, text)
    lines = [f"{path}: a job to begin with; its comments say what may be changed. Next:"]
    if model is not None:
        prepare = f"headway data prepare chats.jsonl --chat --tokenizer {quote(model)}"
        lines.append(f"  {prepare} --pack 2048 --validation 0.02 --out chats")
    file, out = quote(str(path)), quote(str(path.parent / "runs" / job))
    return [
        *lines,
        f"  headway run {file} --nodes 2 --out {out}     # on this machine alone",
        f"  headway submit {file} && headway watch {job}     # on a cluster, as that of `headway up`",
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError("is there already, and stays; give another name, or delete it", str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", str(path)) from error
