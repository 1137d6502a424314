"""Refuses data whose tokens mean something else to the model from which a job starts."""

import json
from pathlib import Path

from headway.daemon.data.data_tokenizer import TOKENIZER_NAME
from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.shards.data_source import MAX_TOKENIZER_BYTES, tokenizer_at


def check_tokenizer(spec: JobSpec, job_file: Path) -> None:
    """Raise ConfigError if most of the data's tokens have other numbers in the model's folder. Blocks.

    A folder or data without a tokenizer is not compared. A few tokens may differ: people add some of their own.
    """
    _check_alike(spec, job_file)
    if not spec.origin.url:
        return
    from headway.daemon.origin.origin_config import as_config_error
    from headway.daemon.origin.origin_folder import OriginFolder

    with as_config_error():
        folder = OriginFolder(spec.origin.url)
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
