"""Reads what a data set says of itself, in a folder of this machine or at a URL: for commands, before a job runs.

All functions block. Every fault of a URL is a ConfigError of one line.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.places import is_url
from headway.daemon.jobs.job import DataSpec, JobSpec
from headway.daemon.jobs.resolve import data_folder, default_cache_dir
from headway.daemon.models.origin_config import as_config_error
from headway.daemon.text.data_tokenizer import (
    BYTES,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    DataTokenizer,
    tokenizer_of,
)
from headway.stages.data.shard_index import INDEX_NAME, MAX_INDEX_BYTES, ShardIndex, parse_index, read_index
from headway.stages.errors import DataError

if TYPE_CHECKING:
    from headway.daemon.models.origin_folder import OriginFolder

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_CONFIG_BYTES: Final = 16 << 20


def check_tokenizer(spec: JobSpec, job_file: Path) -> None:
    """Raise ConfigError if most of the data's tokens have other numbers in the model's folder. Blocks.

    A folder or data without a tokenizer is not compared. A few tokens may differ: people add some of their own.
    """
    _check_alike(spec, job_file)
    if not spec.origin.url:
        return
    with as_config_error():
        folder = _opened(spec.origin.url)
        if not folder.has(TOKENIZER_NAME):
            return
        theirs = _numbers(folder.read_small(TOKENIZER_NAME, MAX_TOKENIZER_BYTES))
    for part, key in zip(spec.data.parts, spec.data.part_keys, strict=True):
        ours = _numbers(_tokenizer_text(part.source).encode())
        num_equal = sum(theirs.get(token) == number for token, number in ours.items())
        if theirs and 2 * num_equal < len(ours):
            what = f"{part.source} was not made with the tokenizer of {spec.origin.url}"
            what += f"; run `headway data prepare` with --tokenizer {spec.origin.url}"
            raise ConfigError(what, f"{job_file}:{key}.source")


def _check_alike(spec: JobSpec, job_file: Path) -> None:
    """Raise ConfigError for sources that were made with several tokenizers."""
    if not spec.data.sources:
        return
    first, *others = ((part.source, _numbers(_tokenizer_text(part.source).encode())) for part in spec.data.parts)
    for index, (source, numbers) in enumerate(others, start=1):
        if first[1] and numbers and numbers != first[1]:
            what = f"{source} was not made with the tokenizer of {first[0]}; prepare both with one --tokenizer"
            raise ConfigError(what, f"{job_file}:data.sources[{index}].source")


def _tokenizer_text(source: str) -> str:
    """Return the tokenizer.json of a data source; empty if it has none."""
    tokenizer = tokenizer_at(source, default_cache_dir())
    return tokenizer.text if tokenizer is not None else ""


def _numbers(text: bytes) -> dict[str, int]:
    """Return the number of each token of a tokenizer.json; empty if it does not say them."""
    try:
        vocabulary = json.loads(text)["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: tokens with their scores
            return {token: number for number, (token, _) in enumerate(vocabulary)}
        return dict(vocabulary)
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def index_at(url: str) -> ShardIndex:
    """Return the index of the data at a URL. Raises ConfigError."""
    with as_config_error():
        raw = _opened(url).read_small(INDEX_NAME, MAX_INDEX_BYTES)
    try:
        return parse_index(raw, f"{url}/{INDEX_NAME}")
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error


def why_no_answer(data: DataSpec) -> str:
    """Return why a URL among a job's sources cannot be read from here now; empty: all can, or there is none."""
    for part in data.parts:
        try:
            if is_url(part.source):
                _opened(part.source).size_of(INDEX_NAME)
        except RecoveryError as error:
            return str(error)
    return ""


def tokenizer_at(source: str, cache_dir: Path) -> DataTokenizer | None:
    """Return the tokenizer beside a data set; None: it has none that can be read. Raises ConfigError, DataError."""
    if not is_url(source):
        folder = data_folder(source, cache_dir)
        return tokenizer_of(folder, read_index(folder))
    index = index_at(source)
    with tempfile.TemporaryDirectory() as draft, as_config_error():
        if index.tokenizer != BYTES:
            away = _opened(source)
            sizes = {index.tokenizer: MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_NAME: MAX_CONFIG_BYTES}
            for name, most_bytes in sizes.items():
                if away.has(name):
                    (Path(draft) / name).write_bytes(away.read_small(name, most_bytes))
        return tokenizer_of(Path(draft), index)


def _opened(url: str) -> "OriginFolder":
    from headway.daemon.models.origin_folder import OriginFolder  # imports fsspec, which most jobs do not need

    return OriginFolder(url)
