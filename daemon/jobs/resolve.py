"""Fixes the machine-dependent parts of a job at its submission: the data's hash and path, what it leaves to devices.

Afterwards no node chooses anything: a spec in etcd has no `auto` on which bits depend.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.near_path import near
from headway.daemon.base.places import is_url
from headway.daemon.jobs.data_choices import (
    check_agreement,
    with_epochs_of,
    with_flags_of,
    with_held_out_of,
    with_schedule,
)
from headway.daemon.jobs.device_defaults import for_devices
from headway.daemon.jobs.job import DataSpec, JobSpec
from headway.daemon.jobs.plugins import with_plugins
from headway.stages.attention_kernels import KernelDevice
from headway.stages.data.source_choice import BUILT_IN_SOURCES, HEADWAY_DOCS, mixture_sha256

if TYPE_CHECKING:
    from headway.stages.data.shard_index import ShardIndex

ReadIndex = Callable[[str], "ShardIndex"]
"""Returns the index of the data at a URL. Raises ConfigError."""


def no_urls(url: str) -> "ShardIndex":
    """Raise ConfigError: this caller reads folders alone."""
    raise ConfigError("is a URL, and only folders are read here", url)


def default_cache_dir() -> Path:
    """Return this user's folder of built-in data: HEADWAY_CACHE_DIR, or `headway` in the XDG cache folder.

    A user of a container may have no home, or none to write to: then it is a folder for temporary files, and a line on
    stderr says so. Raises ConfigError when that is another user's, or cannot be made.
    """
    usual = None
    if told := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(told)
    with suppress(RuntimeError):  # a user without a name and without HOME
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "headway"
        there = next(folder for folder in (usual, *usual.parents) if os.access(folder, os.F_OK))
        if os.access(there, os.W_OK | os.X_OK):
            return usual
    own = Path(tempfile.gettempdir()) / f"headway-cache-{os.getuid()}"
    remedy = "set HEADWAY_CACHE_DIR to a folder of yours"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be made, nor can {usual or '~/.cache'}: {error.strerror}; {remedy}", str(own)
        ) from error
    if own.lstat().st_uid != os.getuid():
        raise ConfigError(f"belongs to another user; {remedy}", str(own))
    _say_once(f"{usual or '~/.cache'} cannot be written to, so data is kept in {own}; {remedy} to keep it longer")
    return own


@cache
def _say_once(text: str) -> None:
    sys.stderr.write(f"headway: {text}\n")


def resolve_job(
    spec: JobSpec,
    *,
    job_file: Path,
    devices: Iterable[KernelDevice],
    cache_dir: Path,
    named: Collection[str] | None = None,
    read_url: ReadIndex = no_urls,
) -> JobSpec:
    """Return the job with everything fixed. devices: those that may compute it.

    named: the keys of its file, so that the devices may decide some others; None: the job leaves none open. read_url:
    reads what lies at a URL.

    A relative data source is relative to the job file's folder. Raises ConfigError: data that is missing, damaged,
    other than the job's sha256, too short, or of a larger vocabulary; a kernel of attention that no device has; an
    adapter beside random weights; a wheel that cannot be used.
    """
    check_adapter(spec, job_file)
    if named is not None:  # otherwise its wheel was read before
        spec = with_plugins(spec, job_file=job_file, cache_dir=cache_dir)
    known = with_data(spec, job_file=job_file, cache_dir=cache_dir, named=named, read_url=read_url)
    return for_devices(known, devices, source=str(job_file), named=named)


def check_adapter(spec: JobSpec, job_file: Path) -> None:
    """Raise ConfigError for an adapter beside random weights."""
    if spec.model.has_adapter and not spec.origin.url:
        what = "the weights beside the adapter would be random; name a model's folder with [model] from, or --model"
        raise ConfigError(what, f"{job_file}:adapter.rank")


def with_data(
    spec: JobSpec,
    *,
    job_file: Path,
    cache_dir: Path,
    named: Collection[str] | None = None,
    read_url: ReadIndex = no_urls,
) -> JobSpec:
    """Return the job with everything fixed that its data decides. Arguments and errors are those of `resolve_job`."""
    found = []
    for part, key in zip(spec.data.parts, spec.data.part_keys, strict=True):
        source, index = _find_data(part, f"{job_file}:{key}", job_file, cache_dir, read_url)
        _check_data(spec, part, source, index, place=f"{job_file}:{key}", job_file=job_file)
        found.append((source, index))
    check_agreement(found, str(job_file), spec.train)
    train, indices = spec.train, [index for _, index in found]
    for index in indices:
        train = with_flags_of(train, index, str(job_file))
    train = with_epochs_of(train, indices[0], str(job_file), named=named)
    train = with_held_out_of(train, indices, str(job_file), weights=spec.data.weights)
    known = replace(spec, data=_named_data(spec.data, found, str(job_file)), train=train)
    return with_schedule(known, str(job_file), named=named)


def _named_data(data: DataSpec, found: "Sequence[tuple[str, ShardIndex]]", job_file: str) -> DataSpec:
    """Return the data with the paths and names of what was found. Raises ConfigError for another name of the whole."""
    if not data.sources:
        ((source, index),) = found
        return DataSpec(source=source, sha256=index.sha256)
    whole = mixture_sha256(index.sha256 for _, index in found)
    if data.sha256 and data.sha256 != whole:
        what = f"the sources hold data {whole[:12]}…, not {data.sha256[:12]}…; correct the hash or the sources"
        raise ConfigError(what, f"{job_file}:data.sha256")
    pairs = zip(data.sources, found, strict=True)
    sources = tuple(replace(each, source=source, sha256=index.sha256) for each, (source, index) in pairs)
    return DataSpec(source="", sha256=whole, sources=sources)


def has_data_here(spec: JobSpec, job_file: Path) -> bool:
    """Return whether the job's folders of data are on this machine. The built-in data always is."""
    from headway.stages.data.shard_index import INDEX_NAME

    folders = [
        part.source for part in spec.data.parts if part.source not in BUILT_IN_SOURCES and not is_url(part.source)
    ]
    try:
        return all((job_file.parent / Path(source).expanduser() / INDEX_NAME).exists() for source in folders)
    except (OSError, RuntimeError):  # RuntimeError: ~NAME of an unknown user
        return False


def data_folder(source: str, cache_dir: Path) -> Path:
    """Return the folder of a resolved source's token shards on this machine; a built-in one is made if needed.

    Raises DataError when it does not exist.
    """
    from headway.stages.data.stdlib_corpus import builtin_corpus, docs_corpus

    if source not in BUILT_IN_SOURCES:
        return Path(source)
    return docs_corpus(cache_dir) if source == HEADWAY_DOCS else builtin_corpus(cache_dir)


def _find_data(
    data: DataSpec, place: str, job_file: Path, cache_dir: Path, read_url: ReadIndex
) -> "tuple[str, ShardIndex]":
    """Return the path or URL, and the index, of one source of a job's data. place: of its keys in the job file."""
    from headway.stages.data.shard_index import read_index
    from headway.stages.errors import DataError

    source = data.source
    if is_url(source):
        return source.rstrip("/"), read_url(source.rstrip("/"))
    try:
        if source not in BUILT_IN_SOURCES:
            source = str((job_file.parent / Path(source).expanduser()).resolve())
        return source, read_index(data_folder(source, cache_dir))
    except (DataError, OSError, RuntimeError) as error:  # RuntimeError: ~NAME of an unknown user, a loop of links
        if source in BUILT_IN_SOURCES:  # which is made here, perhaps on a full disk
            reason = (error.strerror if isinstance(error, OSError) else "") or error
            what = f"{source} cannot be made there: {reason}; set HEADWAY_CACHE_DIR to another folder"
            raise ConfigError(what, str(cache_dir)) from error
        hint = near(Path(source), BUILT_IN_SOURCES) or "; make data with `headway data prepare`"
        raise ConfigError(f"{error}{hint}", f"{place}.source") from error


def _check_data(spec: JobSpec, data: DataSpec, source: str, index: "ShardIndex", *, place: str, job_file: Path) -> None:
    """Raise ConfigError if a job cannot train on a source. source: its path or URL."""
    if data.sha256 and data.sha256 != index.sha256:
        what = f"{source} holds data {index.sha256[:12]}…, not {data.sha256[:12]}…"
        raise ConfigError(f"{what}; correct the hash or the source", f"{place}.sha256")
    if index.vocab_size > spec.model.vocab_size and spec.origin.url:
        what = f"has {index.vocab_size} tokens, and the model {spec.model.vocab_size}; prepare it with its tokenizer"
        what += ", or give the model rows for added tokens (transformers' resize_token_embeddings)"
        raise ConfigError(what, f"{place}.source")
    if index.vocab_size > spec.model.vocab_size:
        raise ConfigError(
            f"{spec.model.vocab_size} is too small for data of {index.vocab_size} tokens; set it to {index.vocab_size}",
            f"{job_file}:model.vocab_size",
        )
    if index.num_tokens <= spec.train.sequence_length:
        raise ConfigError(
            f"{index.num_tokens} tokens of data are too few for sequences of {spec.train.sequence_length}; "
            "shorten them or prepare more data",
            f"{job_file}:train.sequence_length",
        )
