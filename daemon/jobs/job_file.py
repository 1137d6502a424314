"""A job file: TOML in, JobSpec out, or one line that says what is wrong, where, and what to do about it.

Three steps, each of which stops at the first thing it refuses: names (is every key one that the schema has?), types
(field by field, strictly), and rules (jobs/rules.py: is this job possible?). Nothing here depends on the machine; what
does is fixed at submit time by jobs/resolve.py.
"""

from pathlib import Path
from typing import Any

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.rules import check_job
from headway.daemon.jobs.typed_toml import Place, read_text, read_typed, where
from headway.optim.spec import USED_SETTINGS, GroupSpec


def read_job(path: Path) -> JobSpec:
    """The job of a file. Raises ConfigError, one line, for a file that cannot be read or a job that cannot be run."""
    return parse_job(read_text(path, "job file"), str(path))


def parse_job(text: str, source: str = "job") -> JobSpec:
    """The job that TOML text describes; `source` names it in errors. Raises ConfigError at `source:section.key`."""

    def refuse_unused(kind: type, raw: dict[str, Any], place: Place) -> None:
        """A setting that its optimizer would ignore is refused: it looks as if it did something."""
        name = raw.get("name")
        used = USED_SETTINGS.get(name) if kind is GroupSpec and isinstance(name, str) else None
        if used is None:
            return  # no optimizer, or its name is refused, or missing, in its turn
        for key in raw:
            if key != "name" and key not in used:
                raise ConfigError(
                    f"{raw['name']} does not use `{key}`; leave it out (it uses {', '.join(sorted(used - {'name'}))})",
                    where(source, (*place, key)),
                )

    spec: JobSpec = read_typed(text, JobSpec, source, check=refuse_unused)
    check_job(spec, source)
    return spec
