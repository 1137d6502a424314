"""Names a boundary's files below a checkpoint folder. Pure: the coordinator names the files that daemons write."""

import re
from dataclasses import dataclass
from typing import Final

MANIFEST: Final = "manifest.json"
SET_ASIDE: Final = "set-aside.txt"
"""File of a damaged checkpoint that says what is wrong with it. Sweeps leave its folder alone."""
JOURNAL_PARTS: Final = "journal"
"""Folder of a submission's journal parts, next to the folders of its boundaries."""
_FOLDER: Final = re.compile(r"(\d{8,})-(\d{10,})")
_PARTIAL: Final = re.compile(r"\.(.+)\.[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file in the folder of a submission's journal parts."""

    name: str
    place: tuple[int, int]
    """Timeline and boundary of its part."""
    is_whole: bool = True
    """False: a hidden file, which takes the part's name when it is written; its writer may be dead."""


def folder_name(timeline: int, boundary: int) -> str:
    """Return the folder of one boundary of one timeline; names sort by age."""
    return f"{timeline:08d}-{boundary:010d}"


def place_of_folder(name: str) -> tuple[int, int] | None:
    """Return the (timeline, boundary) of a folder's name; None: it is no boundary's folder."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2])) if found is not None else None


def file_name(layer: str) -> str:
    """Return the name of a layer's file within the folder of a boundary."""
    return f"{layer}.safetensors"


def part_name(timeline: int, boundary: int) -> str:
    """Return the file of a journal part within the folder of the parts."""
    return file_name(folder_name(timeline, boundary))


def place_of_part(name: str) -> tuple[int, int] | None:
    """Return the (timeline, boundary) of a journal part's file; None: it is none."""
    stem, dot, suffix = name.partition(".")
    return place_of_folder(stem) if file_name(stem) == f"{stem}{dot}{suffix}" else None


def part_file(name: str) -> PartFile | None:
    """Return what a file in the folder of the parts is; None: it is none of Headway's."""
    partial = _PARTIAL.fullmatch(name)
    place = place_of_part(partial[1] if partial is not None else name)
    return PartFile(name, place, is_whole=partial is None) if place is not None else None


def partial_name(name: str, token: str) -> str:
    """Return the hidden file that takes a name when it is whole. token: 8 hex digits, which no other writer has."""
    return f".{name}.{token}"


def parts_url(url: str) -> str:
    """Return the folder of the journal parts of a checkpoint, from the folder of its boundary."""
    return f"{url.rpartition('/')[0]}/{JOURNAL_PARTS}"


def submission_url(checkpoint_dir: str, job: str, *, uid: str) -> str:
    """Return the folder of a submission's boundaries below a checkpoint folder, resolved or as in the job file.

    uid: makes a later job of this name write elsewhere.
    """
    return "/".join(part for part in (checkpoint_dir.rstrip("/"), job, uid) if part)


def boundary_url(checkpoint_dir: str, job: str, *, timeline: int, boundary: int, uid: str = "") -> str:
    """Return the folder of one boundary's files."""
    return f"{submission_url(checkpoint_dir, job, uid=uid)}/{folder_name(timeline, boundary)}"
