"""Fits the parts of a line on as few lines as a screen's width allows. Pure."""

from collections.abc import Sequence

GAP = "  "
INDENT = "    "


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
