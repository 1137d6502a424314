"""How a job names code of its own, its settings, and the error that names it when it fails. Imports no torch."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Setting = bool | int | float | str | tuple[bool | int | float | str, ...]
Settings = tuple[tuple[str, Setting], ...]
"""A plug-in's own settings, sorted by name: the keywords with which it is made."""

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


MOST_TOLD: Final = 300
"""Characters of an error of a plug-in that are told."""


@dataclass
class PluginError(Exception):
    """A plug-in is wrong, or has failed."""

    plugin: str
    """Its import path, or its wheel."""
    reason: str
    is_machines: bool = False
    """True if it may run on another machine: this one lacks what it imports."""

    def __str__(self) -> str:
        return f"plug-in {self.plugin}: {self.reason}"


IMPORTED: Final[dict[str, Any]] = {}
"""By import path, what this process has imported from its job's wheel, whose hash was compared. Nothing else is run."""


def imported(name: str) -> Any:
    """Return a plug-in. Raises PluginError for one that was not imported from the wheel of this process's job."""
    if name not in IMPORTED:
        raise PluginError(name, "is not imported here: that takes a wheel with its hash, where code is allowed")
    return IMPORTED[name]


def is_import_path(name: str) -> bool:
    """Return whether a name is one of a plug-in, such as `my_things.lion:Lion`."""
    return len(name) <= 200 and _PATH.fullmatch(name) is not None


@contextmanager
def told_by(plugin: str) -> Iterator[None]:
    """Tell what goes wrong inside as PluginError, with its place, also an exit of the process. A lack of memory is no
    fault of the plug-in.
    """
    try:
        yield
    except (PluginError, MemoryError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # A module of a wheel lies inside of a file.
        own = [frame for frame in frames if any(part.is_file() for part in Path(frame.filename).parents)]
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        said = str(traceback.TracebackException.from_exception(error))  # also of an error whose own text raises
        text = said.partition("\n")[0][:MOST_TOLD]
        reason = f"{type(error).__name__}: {text}".rstrip(": ") + place
        raise PluginError(plugin, reason, is_machines=isinstance(error, ImportError)) from error
