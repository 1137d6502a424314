"""What an export carries over from the folder with the initial weights: its small files, and how its shards look."""

from dataclasses import dataclass, field
from pathlib import Path

from headway.daemon.jobs.job import JobSpec
from headway.daemon.origin.carried_files import FILE, HEADER
from headway.daemon.origin.origin_config import as_config_error
from headway.daemon.origin.origin_folder import OriginFolder
from headway.daemon.origin.origin_parts import ranges_of
from headway.daemon.storage.state_key import CARRIED_PART
from headway.stages.state.state_file import read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Bytes by the names of files."""

    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    """All bytes before the data of each file with tensors."""


def carried_in(path: Path) -> Carried:
    """Return the content of the carried part's file. Raises DamagedFileError."""
    _, tensors = read_state(path)
    return _sorted({name: bytes(tensor.numpy()) for name, tensor in tensors.items()})


def carried_of(spec: JobSpec) -> Carried | None:
    """Return what the folder has now; None: the job's weights are random. Raises ConfigError."""
    if not spec.origin.url:
        return None
    with as_config_error():
        folder = OriginFolder(spec.origin.url)
        ranges = ranges_of(folder, CARRIED_PART, model=spec.model)
        return _sorted({name: b"".join(part.read()) for name, part in ranges.items()})


def _sorted(raw: dict[str, bytes]) -> Carried:
    return Carried(
        files={name.removeprefix(FILE): data for name, data in raw.items() if name.startswith(FILE)},
        headers={name.removeprefix(HEADER): data for name, data in raw.items() if name.startswith(HEADER)},
    )
