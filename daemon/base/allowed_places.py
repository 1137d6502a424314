"""Which folders and URLs the jobs of a node may make it open: those below some that its administrator names, or what
training needs and nothing of the machine's own.

A job file names places: of data, of checkpoints, of a model. The daemon opens them with its own rights, which may be
more than those of the job's user.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.places import STORES

SCHEMES: Final = ("file", "hf", "http", "https", *STORES)
"""What is opened where a node names no places: no archive, no code repository, no other process's memory."""
OF_THE_SYSTEM: Final = ("/boot", "/etc", "/proc", "/run/secrets", "/sys")
"""Folders that are not opened there."""
METADATA_NAMES: Final = ("metadata", "metadata.google.internal", "instance-data")
"""Names of the clouds' metadata servers, which are not asked there. Their addresses are link-local ones, but for:"""
METADATA_ADDRESSES: Final = (IPv6Address("fd00:ec2::254"), IPv4Address("100.100.100.200"))
_LOCAL: Final = ("file", "local")
_ENDS_OF_A_FOLDER: Final = re.compile(r"[/\\?#;]")
"""Characters at which one client or server or another ends a folder's name, so `..` before one may lead upwards."""
_ENDS_OF_A_HOST: Final = re.compile(r"[/\\?#]")


class AllowedPlaces:
    """Folders and URLs, with everything below them."""

    def __init__(self, places: Iterable[str] = (), *, never: Iterable[str] = ()) -> None:
        """places: absolute paths, URLs, or a scheme for all of its URLs, as in `s3://`. None: those of SCHEMES, but
        nothing of the system's. never: folders that no job may name, such as that of the node's keys.

        Raises ConfigError for anything else.
        """
        self._places = tuple(_parts(place.strip()) for place in places)
        self._never = tuple(_parts(folder) for folder in (*never, *(() if self._places else OF_THE_SYSTEM)))

    def why_not(self, place: str) -> str:
        """Return why a job may not name a place, as the end of a sentence about it; empty: it may.

        A local path counts as where its links lead.
        """
        try:
            told = _parts(place)
        except ConfigError as error:
            return str(error)
        if any(_is_below(told, folder) for folder in self._never):
            return "is a place of this node's own, which no job may name"
        if any(_is_below(told, allowed) for allowed in self._places):
            return ""
        if self._places:
            return "is not below one of this node's allowed_places"
        if len(told) > 1 and _is_metadata_server(told[1]):
            return "is a place of this node's own, which no job may name"
        return "" if told[0] in SCHEMES else f"is opened only by a node whose allowed_places name {told[0]}://"


def _is_below(place: tuple[str, ...], folder: tuple[str, ...]) -> bool:
    return place[: len(folder)] == folder


def _is_metadata_server(host: str) -> bool:
    """Return whether a cloud tells a machine its own credentials there, however the address is written."""
    host = _ENDS_OF_A_HOST.split(host)[0].rpartition("@")[2].casefold()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    host = host.removesuffix(".")
    if host in METADATA_NAMES:
        return True
    with suppress(OSError, ValueError):
        host = socket.inet_ntoa(socket.inet_aton(host))  # 0xa9fea9fe is an address too
    try:
        found = ip_address(host)
    except ValueError:
        return False
    told = found.ipv4_mapped or found if isinstance(found, IPv6Address) else found
    return told.is_link_local or told in METADATA_ADDRESSES


def check_places(places: Iterable[str]) -> None:
    """Raise ConfigError for what AllowedPlaces does not take, without a look at any file system."""
    for place in places:
        _parts(place.strip(), follow=os.path.normpath)


def _parts(place: str, *, follow: Callable[[str], str] = os.path.realpath) -> tuple[str, ...]:
    """Return scheme, host and folders of a place, so that what is below another one begins with its parts."""
    scheme, separator, rest = place.partition("://")
    if not all(character.isprintable() for character in place):  # clients leave some of them out, also between dots
        raise ConfigError(f"{place!r} has a character that cannot be printed; use a name in UTF-8, and a UTF-8 locale")
    if "::" in place:
        raise ConfigError(f"{place!r} chains file systems with `::`")
    if not separator or scheme in _LOCAL:
        path = rest if separator else place
        if not os.path.isabs(path):  # noqa: PTH117 (a place of a URL is no Path)
            raise ConfigError(f"{place!r} is neither an absolute path nor a URL")
        try:
            return ("file", *PurePosixPath(follow(path)).parts)
        except OSError as error:
            raise ConfigError(f"{place!r} cannot be followed: {error.strerror}") from error
    parts = [part for part in unquote(rest).split("/") if part not in ("", ".")]
    if ".." in _ENDS_OF_A_FOLDER.split(unquote(rest)):
        raise ConfigError(f"{place!r} leads out of its folder with `..`")
    return (scheme, *parts)
