"""Where a boundary's files lie below a checkpoint folder. Pure: the coordinator names what the daemons write."""

import re
from typing import Final

_FOLDER: Final = re.compile(r"(\d{8,})-(\d{10,})")


def folder_name(timeline: int, boundary: int) -> str:
    """The folder of one boundary of one timeline; sorts by age."""
    return f"{timeline:08d}-{boundary:010d}"


def place_of_folder(name: str) -> tuple[int, int] | None:
    """The (timeline, boundary) of a folder's name; None: it is no boundary's."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2])) if found is not None else None


def submission_url(checkpoint_dir: str, job: str, *, uid: str) -> str:
    """The folder of a submission's boundaries below a checkpoint folder, resolved or as the job's file gives it.

    uid: so that a later job of the same name writes elsewhere.
    """
    return "/".join(part for part in (checkpoint_dir.rstrip("/"), job, uid) if part)


def boundary_url(checkpoint_dir: str, job: str, *, timeline: int, boundary: int, uid: str = "") -> str:
    """The folder of one boundary's files."""
    return f"{submission_url(checkpoint_dir, job, uid=uid)}/{folder_name(timeline, boundary)}"
