"""Follows which message a chat template renders where: each round of its loops writes a note into the text. Pure.

A note is a number between two code points that stand for no character, so that it also passes through macros.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

_NOTE: Final = re.compile("\ufdd2([\ufdd6-\ufddf]+)\ufdd3")
_DIGITS: Final = str.maketrans("0123456789", "".join(map(chr, range(0xFDD6, 0xFDE0))))
_CALLED: Final = "_loop_note"
ENDED: Final = object()
"""Noted when a loop has ended."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a loop."""

    item: Any
    """What the loop's variable was; ENDED: it is what follows a loop."""
    start: int
    end: int
    depth: int
    """Number of the rounds around it."""


class LoopNotes:
    """The notes of one rendering."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Any]] = []

    def clear(self) -> None:
        """Forget the last rendering."""
        self._noted.clear()

    def note(self, loop: int, item: Any = ENDED) -> str:
        """Return the note of a round that begins, or of a loop's end."""
        self._noted.append((loop, item))
        return "\ufdd2" + str(len(self._noted) - 1).translate(_DIGITS) + "\ufdd3"

    def rounds(self, raw: str) -> tuple[str, list[Round]]:
        """Return a text without its notes, and the rounds in it, in the order of their ends.

        Raises ValueError for a note that the template has made up.
        """
        parts = _NOTE.split(raw)
        found: list[Round] = []
        open_: list[tuple[int, Any, int]] = []
        length = len(parts[0])
        for number, part in zip(parts[1::2], parts[2::2], strict=True):
            place = int(number.translate({0xFDD6 + digit: str(digit) for digit in range(10)}))
            if place >= len(self._noted):
                raise ValueError("it has a note that no loop wrote")
            loop, item = self._noted[place]
            if loop in (each for each, _, _ in open_):
                while _close(open_, found, length) != loop:
                    pass
            if item is ENDED:
                found.append(Round(ENDED, length, length, len(open_)))
            else:
                open_.append((loop, item, length))
            length += len(part)
        while open_:
            _close(open_, found, length)
        return "".join(parts[::2]), found


def _close(open_: list[tuple[int, Any, int]], found: list[Round], end: int) -> int:
    loop, item, start = open_.pop()
    found.append(Round(item, start, end, len(open_)))
    return loop


def with_notes(environment: Any, source: str, nodes: Any, note: Callable[..., str]) -> Any:
    """Return a template with a note at the begin of each round of a loop, and after it. nodes: jinja2's module."""
    environment.globals[_CALLED] = note
    tree = environment.parse(source)
    loops = 0

    def noted(*arguments: Any) -> Any:
        call = nodes.Call(nodes.Name(_CALLED, "load"), list(arguments), [], None, None)
        return nodes.Output([call]).set_lineno(1)

    def visit(node: Any, *, is_captured: bool) -> None:
        nonlocal loops
        is_captured |= isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock)
        for field, value in node.iter_fields():
            children: Sequence[Any] = value if isinstance(value, list) else [value]
            with_ends: list[Any] = []
            for child in children:
                with_ends.append(child)
                if isinstance(child, nodes.Node):
                    visit(child, is_captured=is_captured)
                if isinstance(child, nodes.For) and not is_captured:
                    loops += 1
                    number, target = nodes.Const(loops), child.target
                    named = isinstance(target, nodes.Name)
                    item = nodes.Name(target.name, "load") if named else nodes.Const(None)
                    child.body.insert(0, noted(number, item))
                    with_ends.append(noted(number))
            if isinstance(value, list):
                setattr(node, field, with_ends)

    visit(tree, is_captured=False)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))
