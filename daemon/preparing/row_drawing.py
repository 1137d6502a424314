"""Draws a row of data for people: targets in colour on a terminal and in HTML, in brackets elsewhere."""

import io
from typing import TYPE_CHECKING, Final

from headway.daemon.preparing.shown_row import ShownRow
from headway.daemon.terminal import console

if TYPE_CHECKING:
    from rich.text import Text

_TARGET: Final = "bold green"
_SPECIAL: Final = "underline"
_OTHER: Final = "dim"


def drawn(row: ShownRow, *, marks: str = "", max_characters: int = 0) -> "Text":
    """Return a row, with a line of counts before it.

    marks: around what is trained, where colours do not show it. max_characters: of the row's text; 0: all.
    """
    from rich.text import Text

    found = Text(f"{heading(row)}\n", end="")
    room = max_characters or sum(len(part.text) for part in row.parts)
    shown = [part for part in row.parts if not part.is_padding]
    was_target = False
    for part in shown:
        if room > 0:
            if part.is_target != was_target and marks:
                found.append(marks[0] if part.is_target else marks[1])
            was_target = part.is_target
            style = _TARGET if part.is_target else _OTHER
            found.append(part.text[:room], f"{style} {_SPECIAL}" if part.is_special else style)
        room -= len(part.text)
    if was_target and marks:
        found.append(marks[1])
    if room < 0:
        found.append(" …", _OTHER)
    if padding := sum(part.num_tokens for part in row.parts if part.is_padding):
        found.append(f" … {padding:,} tokens of padding", _OTHER)
    return found


def heading(row: ShownRow) -> str:
    """Return how many targets each document of a row has."""
    total = sum(part.num_tokens for part in row.parts)
    targets = sum(sum(each.targets) for each in row.documents)
    said = f"{row.kind} {row.number:,} of {row.num_rows:,}: {targets:,} of {total:,} tokens are trained"
    for number, each in enumerate(row.documents, 1):
        if len(each.targets) > 1 or len(row.documents) > 1:
            name = f"document {number}" if len(row.documents) > 1 else "answers"
            counts = " + ".join(f"{count:,}" for count in each.targets) or "0"
            said += f"; {name}: {counts}" + (f" of {each.num_tokens:,}" if len(row.documents) > 1 else "")
    return said


def html(row: ShownRow) -> str:
    """Return a page with the row."""
    page = console(io.StringIO(), width=120)
    page.record = True
    page.print(drawn(row))
    return page.export_html()
