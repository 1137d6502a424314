"""Commands about data."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.cli.options import (
    Answer,
    AsJson,
    Commands,
    OutDir,
    Panel,
    Where,
    add,
    add_group,
    as_json_text,
    say,
    show_sending,
    warn,
)
from headway.daemon.text.preparation import Preparation

_FIRST_CHARACTERS = 1200
"""Text of the first row with which a preparation of conversations ends."""

Shards = Annotated[Path, typer.Argument(metavar="FOLDER", help="Token shards on this machine.", show_default=False)]

if TYPE_CHECKING:
    from headway.daemon.text.shown_row import ShownRow


def register(app: Commands) -> None:
    """Add the commands."""
    add(add_group(app, "data", _data, panel=Panel.SET_UP), prepare, show, send)


def _data() -> None:
    """Make token shards, and send them to a cluster.

    \b
    headway data prepare books/ --out data/books
    headway data show data/books --row 3
    headway data send data/books
    """


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…", help="Files of text or records, folders, 'data/*.jsonl', or hf:NAME.", show_default=False
        ),
    ],
    out: OutDir,
    options: Preparation,
    as_json: AsJson = False,
) -> Answer:
    """Make a folder of token shards, for [data] source.

    \b
    headway data prepare books/ --out data/books
    headway data prepare hf:HuggingFaceFW/fineweb-edu --config sample-10BT --tokenizer tokenizer.json --out data/fineweb
    headway data prepare chats.jsonl --chat --tokenizer Qwen3-4B --pack 2048 --validation 0.01 --out data/chats
    """
    from headway.daemon.base.terminal import console
    from headway.daemon.client.few_rows import few_rows
    from headway.daemon.text.prepare import prepare as prepare_data
    from headway.daemon.text.shown_row import read_row
    from headway.daemon.text.summary import lines_of, table_of
    from headway.stages.errors import DataError
    from headway.stages.spec import TrainSpec

    screen = console(sys.stderr)
    prepared = prepare_data(sources, out, options, warn=warn, console=screen if screen.is_terminal else None)
    if as_json:
        return as_json_text({"out": str(out), **table_of(prepared)})
    for line in lines_of(out, prepared):
        say(line)
    length = options.pack or TrainSpec().sequence_length
    usual = TrainSpec(sequence_length=length, epochs=1, eval_every=1 if options.validation else 0)
    with suppress(DataError, OSError):  # the data is whole
        if few := few_rows(usual, out, prepared.index):
            warn(f"with a job's default microbatches {few}")
    if not options.has_chats:
        return None
    _draw(read_row(out, 1), max_characters=_FIRST_CHARACTERS)
    return "`headway data show` shows any other row"


def show(
    folder: Shards,
    row: Annotated[int, typer.Option(min=1, help="Row, or document of a stream, from 1.")] = 1,
    validation: Annotated[bool, typer.Option("--validation", help="Of the validation split.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page instead.", show_default=False)] = None,
    as_json: AsJson = False,
) -> Answer:
    """Show what is trained in a row: in colour, or in ⟦ ⟧ without a terminal; special tokens are underlined.

    \b
    headway data show data/chats --row 3
    headway data show data/chats --row 3 --html row.html
    """
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.text.shown_row import html as page_of
    from headway.daemon.text.shown_row import read_row

    found = read_row(folder, row, is_validation=validation)
    if html is not None:
        try:
            html.write_text(page_of(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", str(html)) from error
        return f"{html}: {found.kind} {found.number}"
    if as_json:
        return as_json_text(found.table)
    _draw(found)
    return None


def _draw(row: "ShownRow", *, max_characters: int = 0) -> None:
    """Print a row. max_characters: of its text; 0: all."""
    from headway.daemon.base.terminal import console
    from headway.daemon.text.shown_row import drawn

    screen = console(sys.stdout)
    has_colours = screen.is_terminal and screen.color_system is not None and not screen.no_color
    marks = "" if has_colours else "⟦⟧" if screen.encoding.startswith("utf") else "{}"
    screen.print(drawn(row, marks=marks, max_characters=max_characters), soft_wrap=True)


def send(folder: Shards, where: Where, as_json: AsJson = False) -> Answer:
    """Send token shards to the node with the most room, unless a node has them; `submit` does so by itself.

    Use it for a job that waits for data that its nodes have lost. Each node fetches what it needs from the others. A
    transfer that broke off goes on where it stopped.

    \b
    headway data send data/books
    """
    from headway.daemon.base.errors import ConfigError
    from headway.daemon.client.submission import send_missing
    from headway.daemon.jobs.job import DataSpec
    from headway.stages.data.shard_index import read_index
    from headway.stages.errors import DataError

    try:
        data = DataSpec(source=str(folder.expanduser().resolve()), sha256=read_index(folder.expanduser()).sha256)
    except (DataError, OSError, RuntimeError) as error:  # RuntimeError: ~NAME of an unknown user, a loop of links
        raise ConfigError(f"{error}; make data with `headway data prepare`", "FOLDER") from error
    warnings: list[str] = []
    sent = where.run(lambda session: send_missing(session, data, warn=warnings.append, tell=show_sending))
    if as_json:
        return as_json_text({"sent": sent, "warnings": warnings})
    for line in warnings:
        warn(line)
    is_there = [] if sent or warnings else [f"{data.source}: a node has it already"]
    return [*(each.told for each in sent), *is_there]
