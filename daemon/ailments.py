"""What the entries of a node's `ailments` are called that are about one job. Pure."""


def job_ailment(job: str) -> str:
    """What keeps a leader from deciding about a job."""
    return f"job {job}"


def data_ailment(job: str) -> str:
    """Why a node cannot read a job's data."""
    return f"data of {job}"


def checkpoint_ailment(job: str) -> str:
    """Why a node cannot read the checkpoint that a job starts from."""
    return f"checkpoint of {job}"
