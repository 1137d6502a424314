"""Reads a job file: TOML in, JobSpec out, or one line that says what is wrong, where, and what to do about it.

There are three steps, each of which stops at its first error: names (is every key in the schema?), types (field by
field, strictly), and rules (jobs/rules.py: is this job possible?). No step depends on the machine; jobs/resolve.py
fixes the machine's part at submit time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import DataSpec, JobSpec, OriginSpec
from headway.daemon.jobs.rules import check_job
from headway.daemon.jobs.typed_toml import Place, nearest, parse_toml, read_table, read_text, where
from headway.optim.spec import OPTIMIZERS, USED_BY_ALL, USED_BY_PLUGINS, GroupSpec
from headway.stages.plugin_names import is_import_path
from headway.stages.spec import AdapterSpec, ModelSpec

OpenModel = Callable[[str, Sequence[str]], tuple[OriginSpec, ModelSpec]]
"""Returns the places of a model's folder, and its model, without the keys of its config.json that a job ignores. Of a
folder of adapters the model is the one beside them, with its adapter. Raises ConfigError.
"""
FROM = "from"
"""The key of `[model]` that names the folder with the initial weights. No field: it becomes the job's origin."""
IGNORE = "ignore"
"""The key of `[model]` that names keys of its config.json. It becomes a part of the origin too."""
_OF_FOLDER: Final = frozenset({"rank", "alpha", "rslora", "targets"})
"""Keys of `[adapter]` that a folder of adapters says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobFile(JobSpec):
    """The sections of a file: those of a job, and one that becomes a part of the model."""

    adapter: AdapterSpec = field(default_factory=AdapterSpec)

    def spec(self) -> JobSpec:
        sections = {item.name: getattr(self, item.name) for item in fields(JobSpec)}
        return JobSpec(**sections | {"model": replace(self.model, adapter=self.adapter)})


def read_job_file(
    path: Path, *, open_model: OpenModel | None = None, model_from: str = ""
) -> tuple[JobSpec, frozenset[str]]:
    """Return the job of a file, and the keys that the file names, such as `train.dtype`.

    open_model, model_from: as for `parse_job`.

    Raises ConfigError, one line, for an unreadable file or an impossible job.
    """
    text, named = read_text(path, "job file"), set[str]()
    spec = parse_job(text, str(path), named=named, open_model=open_model, model_from=model_from)
    return spec, frozenset(named)


def parse_job(
    text: str,
    source: str = "job",
    *,
    named: set[str] | None = None,
    open_model: OpenModel | None = None,
    model_from: str = "",
) -> JobSpec:
    """Return the job of TOML text; `source` names it in errors. Raises ConfigError at `source:section.key`.

    The keys that the text names are added to `named`. open_model: reads the folder of `[model] from`; None: a job that
    names one is refused. model_from: a folder that the text need not name.
    """
    return job_of(parse_toml(text, source), source, named=named, open_model=open_model, model_from=model_from)


def job_of(
    raw: dict[str, Any],
    source: str,
    *,
    named: set[str] | None = None,
    open_model: OpenModel | None = None,
    model_from: str = "",
) -> JobSpec:
    """Return the job of parsed TOML, which is used up. Arguments and errors are those of `parse_job`."""

    said: set[str] = set() if named is None else named

    def check_keys(kind: type, raw: dict[str, Any], place: Place) -> None:
        """Note the keys, and refuse a setting that its optimizer would ignore: it looks as if it had an effect."""
        said.update(".".join((*place, key)) for key in raw)
        name = raw.get("name")
        if kind is not GroupSpec or not isinstance(name, str):
            return  # a later check refuses its absence
        if name in OPTIMIZERS:
            used = OPTIMIZERS[name].settings | USED_BY_ALL
        elif is_import_path(name):
            used = USED_BY_PLUGINS
        else:
            known = f"is not one of {', '.join(OPTIMIZERS)}{nearest(name, list(OPTIMIZERS))}"
            what = f"{name[:60]!r} {known}; a plug-in's is like my_things.lion:Lion"
            raise ConfigError(what, where(source, (*place, "name")))
        for key in raw:
            if key != "name" and key not in used:
                raise ConfigError(
                    f"{raw['name']} does not use `{key}`; leave it out (it uses {', '.join(sorted(used - {'name'}))})",
                    where(source, (*place, key)),
                )

    folder = _taken_folder(raw, source, model_from)
    ignored = _taken_keys(raw, source, has_folder=bool(folder))
    told: _JobFile = read_table(raw, _JobFile, source, check=check_keys)
    told = replace(told, data=_sole_or_several(told.data, raw.get("data", {}), source))
    spec = told.spec()
    if folder:
        spec = _begun_with(spec, folder, raw, ignored=ignored, source=source, open_model=open_model)
    if "adapter" in raw and "rank" not in raw["adapter"] and not spec.origin.adapter:
        raise ConfigError("is missing: without it all weights are trained; 16 is usual", f"{source}:adapter.rank")
    check_job(spec, source, named=None if folder else said)
    return spec


def _sole_or_several(data: DataSpec, table: dict[str, Any], source: str) -> DataSpec:
    """Return the data of one source as `source`, and of several without it. Raises ConfigError for both."""
    if not data.sources:
        return data
    if "source" in table:
        raise ConfigError("the file names [[data.sources]] as well; leave one of them out", f"{source}:data.source")
    if len(data.sources) > 1:
        return replace(data, source="")
    (sole,) = data.sources
    if sole.sha256 and data.sha256 and sole.sha256 != data.sha256:
        raise ConfigError("is not data.sha256; leave one of them out", f"{source}:data.sources[0].sha256")
    if sole.weight <= 0:
        raise ConfigError(f"must be above 0, is {sole.weight}", f"{source}:data.sources[0].weight")
    return DataSpec(source=sole.source, sha256=sole.sha256 or data.sha256)


def _shown(value: object) -> str:
    """Return a value for people: of a table, what is set."""
    if is_dataclass(value):
        told = {item.name: getattr(value, item.name) for item in fields(value)}
        return ", ".join(f"{name} = {_shown(each)}" for name, each in told.items() if each)
    return str(value)


def _taken_folder(raw: dict[str, Any], source: str, model_from: str) -> str:
    """Take `[model] from` out of a parsed job file. Raises ConfigError when it is no text, or names another folder."""
    model = raw.get("model")
    place = f"{source}:model.{FROM}"
    if not isinstance(model, dict) or FROM not in model:
        return model_from
    folder = model.pop(FROM)
    if not isinstance(folder, str) or not folder.strip():
        raise ConfigError("names no folder; write a path or a URL, or leave it out", place)
    if model_from and model_from != folder:
        raise ConfigError(f"is {folder!r}, and --model is {model_from!r}; leave one of them out", place)
    return folder


def _taken_keys(raw: dict[str, Any], source: str, *, has_folder: bool) -> tuple[str, ...]:
    """Take `[model] ignore` out of a parsed job file. Raises ConfigError when it is no list of texts."""
    model = raw.get("model")
    if not isinstance(model, dict) or IGNORE not in model:
        return ()
    keys, place = model.pop(IGNORE), f"{source}:model.{IGNORE}"
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError('is no list of keys, such as ["a_key"]', place)
    if twice := next((key for key, number in Counter(keys).items() if number > 1), ""):
        raise ConfigError(f"names {twice!r} twice", place)
    if not has_folder:
        raise ConfigError(f"names keys of the config.json of `{FROM}`, which is missing", place)
    return tuple(sorted(set(keys)))


def _begun_with(
    spec: JobSpec,
    folder: str,
    raw: dict[str, Any],
    *,
    ignored: tuple[str, ...],
    source: str,
    open_model: OpenModel | None,
) -> JobSpec:
    """Return the job with a folder's model. Raises ConfigError for a key that says something else."""
    if open_model is None:
        raise ConfigError("names a folder, which this command does not read", f"{source}:model.{FROM}")
    origin, model = open_model(folder, ignored)
    for key in raw.get("model", {}):
        ours, theirs = getattr(spec.model, key), getattr(model, key)
        if key == "head_dim":  # a config.json may leave it out, and 0 says the same
            ours, theirs = ours or model.head_width, model.head_width
        if ours != theirs:
            what = f"is {_shown(ours)}, but config.json of {origin.url} gives {_shown(theirs)}; leave it out"
            raise ConfigError(what, f"{source}:model.{key}")
    adapter = spec.model.adapter
    if origin.adapter:
        named = raw.get("adapter", {}).keys()
        for key in sorted(_OF_FOLDER & named):
            ours, theirs = getattr(adapter, key), getattr(model.adapter, key)
            if ours != theirs:
                what = f"is {ours}, but the adapters of {origin.adapter} have {theirs}; leave it out"
                raise ConfigError(what, f"{source}:adapter.{key}")
        taken = _OF_FOLDER | ({"dropout"} - named)
        adapter = replace(adapter, **{key: getattr(model.adapter, key) for key in taken})
    origin = replace(origin, job=spec.job.name, ignored=ignored)
    return replace(spec, model=replace(model, adapter=adapter), origin=origin)
