"""A job file: TOML in, JobSpec out, or one line that says what is wrong, where, and what to do about it.

Three steps, each of which stops at the first thing it refuses: names (is every key one that the schema has?), types
(field by field, strictly), and rules (jobs/rules.py: is this job possible?). Nothing here depends on the machine; what
does is fixed at submit time by jobs/resolve.py.
"""

import dataclasses
import difflib
import math
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.rules import check_job
from headway.optim.spec import USED_SETTINGS, GroupSpec


def read_job(path: Path) -> JobSpec:
    """The job of a file. Raises ConfigError, one line, for a file that cannot be read or a job that cannot be run."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError("no such job file", str(path)) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"line {line} is not UTF-8; save this job file in that encoding", str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot read this job file: {error.strerror or error}", str(path)) from error
    return parse_job(text, str(path))


def parse_job(text: str, source: str = "job") -> JobSpec:
    """The job that TOML text describes; `source` names it in errors. Raises ConfigError at `source:section.key`."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", source) from error
    spec: JobSpec = _read_table(raw, JobSpec, source, ())
    check_job(spec, source)
    return spec


def _read_table(raw: object, kind: type, source: str, path: tuple[str, ...]) -> Any:
    """A TOML table as the dataclass `kind`; `path` is where it stands in the file."""
    if not isinstance(raw, dict):
        raise ConfigError(f"expected a table, got {_type_name(raw)}", _where(source, path))
    hints = get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in raw:
        if key not in fields:
            raise ConfigError(_unknown(key, list(fields), path), _where(source, (*path, key)))
    if kind is GroupSpec:
        _refuse_unused(raw, source, path)
    values: dict[str, Any] = {}
    for name, item in fields.items():
        if name in raw:
            values[name] = _read_value(raw[name], hints[name], source, (*path, name))
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[name]):
                raise ConfigError(f"`{name}` is missing", _where(source, path))
            values[name] = _read_table({}, hints[name], source, (*path, name))  # names the key that is missing
    return kind(**values)


def _read_value(raw: object, kind: Any, source: str, path: tuple[str, ...]) -> Any:
    """One value as a field's type. An integer may stand for a float, nothing else may stand for anything else."""
    if dataclasses.is_dataclass(kind):
        return _read_table(raw, kind, source, path)  # type: ignore[arg-type]
    where = _where(source, path)
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        if raw not in choices:
            hint = _nearest(str(raw), choices)
            raise ConfigError(f"{_show(raw)} is not one of {', '.join(choices)}{hint}", where)
        return raw
    try:
        value = msgspec.convert(raw, type=kind, strict=True)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).replace("`", "").partition(" - at $")
        reason = reason[:1].lower() + reason[1:]
        raise ConfigError(f"{reason} ({_show(raw)})", where + place) from error
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"expected a finite number, got {number}", where)
    return value


def _refuse_unused(raw: dict[str, Any], source: str, path: tuple[str, ...]) -> None:
    """A setting that its optimizer would ignore is refused: it looks as if it did something."""
    used = USED_SETTINGS.get(str(raw.get("name")))
    if used is None:
        return  # the name itself is refused, or missing, in its turn
    for key in raw:
        if key != "name" and key not in used:
            raise ConfigError(
                f"{raw['name']} does not use `{key}`; leave it out (it uses {', '.join(sorted(used - {'name'}))})",
                _where(source, (*path, key)),
            )


def _unknown(key: str, known: list[str], path: tuple[str, ...]) -> str:
    """The sentence for an unknown key: the nearest right name here, or the section in which it is right."""
    what = "unknown key" if path else "unknown section"
    if hint := _nearest(key, known):
        return what + hint
    for section in dataclasses.fields(JobSpec):
        kind = get_type_hints(JobSpec)[section.name]
        if any(item.name == key for item in dataclasses.fields(kind)):
            return f"{what}; it belongs in [{section.name}]"
    return f"{what}; there are {', '.join(known)}"


def _nearest(word: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else ""


def _where(source: str, path: tuple[str, ...]) -> str:
    return f"{source}:{'.'.join(path)}" if path else source


def _show(raw: object) -> str:
    text = repr(raw) if not isinstance(raw, bool) else str(raw).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(raw: object) -> str:
    return {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "an array"}.get(
        type(raw), type(raw).__name__
    )
