"""How a job names code of its own, its settings, and the error that names it when it fails. Imports no torch."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Setting = bool | int | float | str | tuple[bool | int | float | str, ...]
Settings = tuple[tuple[str, Setting], ...]
"""A plug-in's own settings, sorted by name: the keywords with which it is made."""

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass
class PluginError(Exception):
    """A plug-in is wrong, or has failed."""

    plugin: str
    """Its import path, or its wheel."""
    reason: str

    def __str__(self) -> str:
        return f"plug-in {self.plugin}: {self.reason}"


def is_import_path(name: str) -> bool:
    """Return whether a name is one of a plug-in, such as `my_things.lion:Lion`."""
    return len(name) <= 200 and _PATH.fullmatch(name) is not None


@contextmanager
def told_by(plugin: str) -> Iterator[None]:
    """Tell what goes wrong inside as PluginError, with its place. A lack of memory is no fault of the plug-in."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PluginError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # A module of a wheel lies inside of a file.
        own = [frame for frame in frames if any(part.is_file() for part in Path(frame.filename).parents)]
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        text = str(error).partition("\n")[0]
        raise PluginError(plugin, f"{type(error).__name__}: {text}".rstrip(": ") + place) from error
