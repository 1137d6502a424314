"""What may reach a terminal: one place between everything that is printed and the stream that shows it.

Names, errors, events and logs come from elsewhere. A control character in them could move the cursor, hide a line or
type a command. So the program's stdout and stderr escape control characters, whoever writes; only what this program
draws by itself (`behind`, `console`) goes around that, and its texts are escaped one by one.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

_UNPRINTABLE: Final = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of the text around
    "\u2028\u2029"  # line ends that few would take for one
    "\ud800-\udfff"  # halves of characters, which no stream can encode
    "]"
)


def printable(text: str) -> str:
    r"""A text with every control character but tab and newline as `\u001b`: in JSON, too, it stays what it is."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_name(text: str) -> str:
    r"""A key or a name of any bytes on one line: tab and newline are escaped too."""
    return printable(text).replace("\t", r"\t").replace("\n", r"\n")


class PrintableStream:
    """A text stream that escapes what is written to it, and otherwise is the stream behind it."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, escaped; returns the length of what was given."""
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
    """While it lasts, stdout and stderr escape control characters."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = PrintableStream(behind(sys.stdout)), PrintableStream(behind(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def behind(stream: IO[str]) -> IO[str]:
    """The stream itself, for what this program draws: colours, a line that overwrites itself."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def screen_width() -> int | None:
    """Columns of the terminal that stdout goes to; None: it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def console(stream: IO[str] | None = None, *, width: int | None = None) -> "Console":
    """A rich console on stdout, or another stream, which draws by itself and escapes the texts that it is given."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Escapes what is rendered, before it is cut to its cell's width."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return PrintableConsole(file=behind(stream or sys.stdout), width=width)
