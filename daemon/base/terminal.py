"""Keeps control characters off terminals: one place between all printed text and the stream that shows it.

Names, errors, events and logs come from elsewhere. A control character in them could move the cursor, hide a line or
type a command. So the program's stdout and stderr escape control characters of every writer. Only the program's own
drawings (`behind`, `console`) bypass that, and their texts are escaped one by one.
"""

import io
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

GAP: Final = "  "
INDENT: Final = "    "
LEAST_CUT: Final = 12
"""Least columns to which the last column of a table is cut."""
_UNPRINTABLE: Final = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, except tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # characters that turn the direction of the text around
    "\u2028\u2029"  # rare line ends
    "\ud800-\udfff"  # halves of characters, which no stream can encode
    "]"
)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 batch`, `2 batches`, `1,200 rows`."""
    return f"{number:,} {noun}{('es' if noun.endswith('tch') else 's') * (number != 1)}"


def bar(done: int, total: int, *, width: int = 30) -> str:
    """Return a bar of so many columns, filled as far as the work is done."""
    filled = width * done // total
    return "━" * filled + "╌" * (width - filled)


def printable(text: str) -> str:
    r"""Escape every control character except tab and newline as `\u001b`, which keeps its meaning in JSON."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_name(text: str) -> str:
    """Return a key or a name of any bytes on one line: tab and newline are escaped too."""
    return printable(text).replace("\t", r"\t").replace("\n", r"\n")


class PrintableStream:
    """A text stream that escapes its input, and otherwise is the stream behind it."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, escaped; return the length of the given text."""
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Escape control characters, and what a stream cannot encode, on stdout and stderr inside this context."""
    before = sys.stdout, sys.stderr
    for stream in map(behind, before):
        if isinstance(stream, io.TextIOWrapper):  # of a terminal that shows no UTF-8
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = PrintableStream(behind(sys.stdout)), PrintableStream(behind(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def behind(stream: IO[str]) -> IO[str]:
    """Return the stream itself, for the program's own drawing: colours, a line that overwrites itself."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def screen_width() -> int | None:
    """Return the columns of stdout's terminal; None: stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def console(stream: IO[str] | None = None, *, width: int | None = None) -> "Console":
    """Return a rich console on stdout, or another stream, which draws by itself and escapes the texts that it
    is given.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Escapes rendered text before it is cut to its cell's width."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return PrintableConsole(file=behind(stream or sys.stdout), width=width)


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, screen_width: int | None = None) -> list[str]:
    """Return lines of columns, each as wide as its longest cell, with titles on top.

    screen_width: columns of the screen, to which the last column is cut, but not below LEAST_CUT; None: no screen.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    if screen_width is not None:
        room = max(LEAST_CUT, screen_width - sum(widths[:-1]) - len(GAP) * (len(titles) - 1))
        rows = [(*cells, last if len(last) <= room else f"{last[: room - 1]}…") for *cells, last in rows]
    return [
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [titles, *rows]
    ]


def split_table(
    titles: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, num_keys: int, screen_width: int | None
) -> list[str]:
    """Return a table; one that is wider than the screen as several, one below the other, each with the first columns.

    num_keys: number of these, which say whose row it is. screen_width: None: no screen, one table.
    """
    most = len(titles)
    if screen_width is not None:
        while most > num_keys + 1 and max(map(len, table(titles[:most], [row[:most] for row in rows]))) > screen_width:
            most -= 1
    lines = table(titles[:most], [row[:most] for row in rows])
    if most == len(titles):
        return lines
    left = [(*row[:num_keys], *row[most:]) for row in (titles, *rows)]
    return [*lines, "", *split_table(left[0], left[1:], num_keys=num_keys, screen_width=screen_width)]


def fitted(parts: Sequence[str], width: int | None) -> list[str]:
    """Return the parts on one line or, if that is too long, on several; no part is cut or left out.

    width: columns of the screen; None: no screen, one line. A part that is longer than a line breaks at spaces.
    """
    told = [part for part in parts if part]
    if width is None or len(GAP.join(told)) <= width:
        return [GAP.join(told)]
    lines: list[str] = []
    line = ""
    for part in told:
        if line and len(line) + len(GAP) + len(part) > width:
            lines.append(line)
            line = INDENT + part
        else:
            line = line + GAP + part if line else part
        while len(line) > width and (cut := line.rfind(" ", len(INDENT), width + 1)) > len(INDENT):
            lines.append(line[:cut])
            line = INDENT + line[cut + 1 :]
    return [*lines, line]
