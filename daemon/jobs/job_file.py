"""Reads a job file: TOML in, JobSpec out, or one line that says what is wrong, where, and what to do about it.

There are three steps, each of which stops at its first error: names (is every key in the schema?), types (field by
field, strictly), and rules (jobs/rules.py: is this job possible?). No step depends on the machine; jobs/resolve.py
fixes the machine's part at submit time.
"""

from pathlib import Path
from typing import Any

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.rules import check_job
from headway.daemon.jobs.typed_toml import Place, read_text, read_typed, where
from headway.optim.spec import USED_SETTINGS, GroupSpec


def read_job(path: Path) -> JobSpec:
    """Return the job of a file. Raises ConfigError, one line, for an unreadable file or an impossible job."""
    return read_job_file(path)[0]


def read_job_file(path: Path) -> tuple[JobSpec, frozenset[str]]:
    """Return the job of a file, and the keys that the file names, such as `train.dtype`. Raises as `read_job`."""
    text, named = read_text(path, "job file"), set[str]()
    return parse_job(text, str(path), named=named), frozenset(named)


def parse_job(text: str, source: str = "job", *, named: set[str] | None = None) -> JobSpec:
    """Return the job of TOML text; `source` names it in errors. Raises ConfigError at `source:section.key`.

    The keys that the text names are added to `named`.
    """

    def check_keys(kind: type, raw: dict[str, Any], place: Place) -> None:
        """Note the keys, and refuse a setting that its optimizer would ignore: it looks as if it had an effect."""
        if named is not None:
            named.update(".".join((*place, key)) for key in raw)
        name = raw.get("name")
        used = USED_SETTINGS.get(name) if kind is GroupSpec and isinstance(name, str) else None
        if used is None:
            return  # a later check refuses the name, or its absence
        for key in raw:
            if key != "name" and key not in used:
                raise ConfigError(
                    f"{raw['name']} does not use `{key}`; leave it out (it uses {', '.join(sorted(used - {'name'}))})",
                    where(source, (*place, key)),
                )

    spec: JobSpec = read_typed(text, JobSpec, source, check=check_keys)
    check_job(spec, source)
    return spec
