"""Where a boundary's files lie below a checkpoint folder. Pure: the coordinator names what the daemons write."""


def folder_name(timeline: int, boundary: int) -> str:
    """The folder of one boundary of one timeline; sorts by age."""
    return f"{timeline:08d}-{boundary:010d}"


def boundary_url(checkpoint_dir: str, job: str, *, timeline: int, boundary: int, uid: str = "") -> str:
    """The folder of one boundary's files below a checkpoint folder, resolved or as the job's file gives it.

    uid: of the job's submission, so that a later job of the same name writes elsewhere.
    """
    parts = (checkpoint_dir.rstrip("/"), job, uid, folder_name(timeline, boundary))
    return "/".join(part for part in parts if part)
