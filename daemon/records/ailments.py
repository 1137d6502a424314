"""Names the entries of a node's `ailments` that concern one job, or that others look for. Pure."""

from typing import Final

IDENTITY: Final = "identity"
"""Name of the ailment that another daemon has this node's certificate."""


def job_ailment(job: str) -> str:
    """Name the ailment: a leader cannot decide about a job."""
    return f"job {job}"


def refusal_ailment(job: str) -> str:
    """Name the ailment: a node does not believe a job's record, or the record breaks a rule."""
    return f"refuses job {job}"


def data_ailment(job: str) -> str:
    """Name the ailment: a node cannot read a job's data."""
    return f"data of {job}"


def checkpoint_ailment(job: str) -> str:
    """Name the ailment: a node cannot read the checkpoint that a job starts from."""
    return f"checkpoint of {job}"


VANISHED = "lost job "
"""Begins the name of the ailment: etcd has lost a job, and nobody removed it."""
