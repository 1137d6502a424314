"""Which folders and URLs the jobs of a node may make it open: those below some that its administrator names.

A job file names places: of data, of checkpoints, of a model. The daemon opens them with its own rights, which may be
more than those of the job's user.
"""

import os
from collections.abc import Iterable
from pathlib import PurePosixPath
from urllib.parse import unquote

from headway.daemon.errors import ConfigError

_LOCAL = ("file", "local")


class AllowedPlaces:
    """Folders and URLs, with everything below them."""

    def __init__(self, places: Iterable[str]) -> None:
        """places: absolute paths, URLs, or a scheme for all of its URLs, as in `s3://`. None: everything is allowed.

        Raises ConfigError for anything else.
        """
        self._places = tuple(_parts(place.strip()) for place in places)

    def why_not(self, place: str) -> str:
        """Return why a job may not name a place, as the end of a sentence about it; empty: it may.

        A local path counts as where its links lead.
        """
        if not self._places:
            return ""
        try:
            told = _parts(place)
        except ConfigError as error:
            return str(error)
        if any(told[: len(allowed)] == allowed for allowed in self._places):
            return ""
        return "is not below one of this node's allowed_places"


def _parts(place: str) -> tuple[str, ...]:
    """Return scheme, host and folders of a place, so that what is below another one begins with its parts."""
    scheme, separator, rest = place.partition("://")
    if "::" in place:
        raise ConfigError(f"{place!r} chains file systems with `::`")
    if not separator or scheme in _LOCAL:
        path = rest if separator else place
        if not os.path.isabs(path):  # noqa: PTH117 (a place of a URL is no Path)
            raise ConfigError(f"{place!r} is neither an absolute path nor a URL")
        return ("file", *PurePosixPath(os.path.realpath(path)).parts)
    parts = [part for part in unquote(rest).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ConfigError(f"{place!r} leads out of its folder with `..`")
    return (scheme, *parts)
