"""Finds the keys in which a job differs from the defaults, or from the one whose checkpoint it begins with. Pure.

A change of the recurrence gives other weights after the boundary; any other change gives the same.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from headway.daemon.jobs.data_choices import LEFT_OUT
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.typed_toml import NOT_IN_FILES
from headway.optim.spec import USED_BY_ALL, USED_BY_PLUGINS

_WITHOUT_EFFECT: Final = ("fault.", "placement.", "queue.", "train.eval_", "train.epochs", "train.sync_share")
_ONLY_WHERE: Final = ("train.link", "train.exactness", "train.recompute")
"""Settings of [train] that decide where and how a batch is computed, to the same bits."""
_LENGTHS: Final = ("train.batches", "optim.schedule_batches", "optim.after_end")
"""These count as a change if the rate of a batch differs that both jobs have."""
_NAMES_AND_COUNTS: Final = ("job.name", "optim.matrices.kept", "optim.rest.kept")
_MOST_COMPARED: Final = 10_000
_MOST_SHOWN: Final = 40
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Each as `key old → new`."""

    of_recurrence: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return all changes, for people."""
        return ", ".join((*self.of_recurrence, *self.others))


def changes(spec: JobSpec, origin: JobSpec, boundary: int) -> Changes:
    """Return in which keys a job differs from the job whose boundary it begins with. Both are resolved."""
    ours, theirs = _values(spec), _values(origin)
    differing = {key: f"{key} {_shown(theirs[key])} → {_shown(ours[key])}" for key in ours if ours[key] != theirs[key]}
    rates = _rate_change(spec, origin, boundary)
    counted = {key: text for key, text in differing.items() if _counts(key, has_other_rates=bool(rates))}
    of_recurrence = (*counted.values(), rates) if rates else tuple(counted.values())
    return Changes(
        of_recurrence=of_recurrence, others=tuple(text for key, text in differing.items() if key not in counted)
    )


def values_of(spec: JobSpec) -> dict[str, str]:
    """Return every key that a job file may have, with its value in TOML."""
    sections = {item: getattr(spec, item) for item in _named(spec)} | {"adapter": spec.model.adapter}
    return {key: told for name, section in sections.items() for key, told in _in_toml(section, name).items()}


def job_text(spec: JobSpec, *, whole: tuple[str, ...] = ()) -> str:
    """Return a file of this job: the keys whose values are not the defaults, and those that are computed where a file
    leaves them out, one a line. whole: beginnings of keys that it names in any case, if the job uses them.
    """
    values, usual = values_of(spec), values_of(JobSpec(job=JobSection(name="")))
    unused = {
        f"optim.{group}.{name}"
        for group, of in (("matrices", spec.optim.matrices), ("rest", spec.optim.rest))
        for name in _named(of)
        if name not in (USED_BY_PLUGINS if of.is_plugin else of.kind.settings | USED_BY_ALL) | {"name"}
    }
    kept = {key for key, value in values.items() if usual.get(key) != value} | ({*LEFT_OUT} - unused)
    kept |= {key for key in values if whole and key.startswith(whole)} - unused
    kept |= {f"{key.rpartition('.')[0]}.name" for key in kept if key.startswith(("optim.matrices.", "optim.rest."))}
    if spec.data.sources:
        kept -= {"data.source", "data.sha256"}
    lines = [f"{key} = {value}" for key, value in values.items() if key in kept]
    folder, ignored = spec.origin.adapter or spec.origin.url, spec.origin.ignored
    origin = [f"model.from = {_toml(folder)}"] if folder else []
    origin += [f"model.ignore = {_toml(ignored)}"] if ignored else []
    return "\n".join((*origin, *lines, ""))


def _named(value: Any) -> list[str]:
    return [item.name for item in fields(value) if not item.metadata.get(NOT_IN_FILES)]


def _in_toml(value: Any, key: str) -> dict[str, str]:
    if not is_dataclass(value):
        told = dict(value) if key.endswith("settings") else value  # pairs here, a table in a file
        return {} if value is None else {key: _toml(told)}
    found: dict[str, str] = {}
    for name in _named(value):
        found |= _in_toml(getattr(value, name), f"{key}.{name}")
    return found


def _toml(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if is_dataclass(value):
        value = {name: getattr(value, name) for name in _named(value)}
    if isinstance(value, Mapping):
        pairs = ((name if _BARE.fullmatch(name) else _toml(name), inner) for name, inner in value.items())
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in pairs if inner is not None) + " }"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | int) else repr(value)
    return text.replace("\x7f", "\\u007f")  # which JSON allows


def _counts(key: str, *, has_other_rates: bool) -> bool:
    """Return whether another value of a key gives other bits."""
    if key in _LENGTHS:
        return has_other_rates
    return not key.startswith(_WITHOUT_EFFECT) and key not in _ONLY_WHERE


def _rate_change(spec: JobSpec, origin: JobSpec, boundary: int) -> str:
    """Return the first batch from the boundary on whose rate has another factor in both jobs; empty: there is none."""
    last = min(spec.train.batches, origin.train.batches) - 1
    ours, theirs = (each.optim.rate_factors(each.train.batches) for each in (spec, origin))
    step = max(1, (last - boundary) // _MOST_COMPARED)
    batch = next((b for b in (*range(boundary, last, step), last) if b >= boundary and ours(b) != theirs(b)), None)
    if batch is None:
        return ""
    return f"so the rates' factor in batch {batch} {theirs(batch):.4g} → {ours(batch):.4g}"


def _values(spec: JobSpec) -> dict[str, Any]:
    """Return the values of a job's keys but those of its model and origin, and without the place of its data."""
    found = {"data.sha256": spec.data.sha256, "data.weights": list(spec.data.weights)}
    found["plugins.sha256"] = spec.plugins.sha256
    for name in ("job", "train", "optim", "fault", "placement", "queue"):
        found |= _flat(getattr(spec, name), name)
    return {key: value for key, value in found.items() if key not in _NAMES_AND_COUNTS}


def _flat(value: Any, key: str) -> dict[str, Any]:
    if not is_dataclass(value):
        return {key: repr(value) if isinstance(value, str) else value}
    found: dict[str, Any] = {}
    for item in fields(value):
        found |= _flat(getattr(value, item.name), f"{key}.{item.name}")
    return found


def _shown(value: Any) -> str:
    """Return a value for people, cut to what tells it from others."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
