"""Reads the config.json of the folder that `[model] from` names. No torch here: `headway plan` reads it too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.jobs.job import OriginSpec
from headway.daemon.jobs.job_file import OpenModel
from headway.daemon.origin.adapter_origin import adapter_spec
from headway.daemon.origin.carried_files import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from headway.stages.model.hugging_face import model_spec
from headway.stages.spec import AdapterSpec, ModelSpec

_MAX_SENTENCE: Final = 500
"""Maximum characters of a sentence about a config: its keys and values may have thousands."""


def model_opener(base: Path) -> OpenModel:
    """Return the reader of folders that a job file names. base: what a relative path is relative to."""

    def open_model(folder: str, ignored: Sequence[str] = ()) -> tuple[OriginSpec, ModelSpec]:
        from headway.daemon.origin.origin_folder import OriginFolder  # imports fsspec, which most jobs do not need
        from headway.daemon.origin.tensor_places import check_adapter_folder, check_unambiguous, parsed_table

        url, adapter_url, table = _url_of(base, folder), "", None
        if "://" not in folder and not Path(url).exists():
            raise ConfigError("there is no such folder; a model of the Hub is written hf://OWNER/NAME", url)
        with as_config_error():
            opened = OriginFolder(url)
            if opened.has(ADAPTER_CONFIG_NAME):
                place, adapter_url = f"{url}/{ADAPTER_CONFIG_NAME}", url
                check_adapter_folder(opened)
                table = parsed_table(opened.read_small(ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES), place)
                url = _base_of(base, table, place)
                opened = OriginFolder(url)
            config = parsed_table(opened.read_small(CONFIG_NAME, MAX_CONFIG_BYTES), f"{url}/{CONFIG_NAME}")
            model = _model_of(config, ignored, f"{url}/{CONFIG_NAME}")
            check_unambiguous(opened, is_tied=model.tie_word_embeddings)
            if table is not None:
                model = replace(model, adapter=_adapter_of(table, model, f"{adapter_url}/{ADAPTER_CONFIG_NAME}"))
        return OriginSpec(url=url, adapter=adapter_url), model

    return open_model


def whole_path(folder: str | None) -> str:
    """Return the folder of `--model`, which is relative to the working folder; empty: none was given."""
    if folder is None:
        return ""
    return folder if "://" in folder else _local(Path.cwd(), folder)


def _url_of(base: Path, folder: str) -> str:
    return folder.rstrip("/") if "://" in folder else _local(base, folder)


def _base_of(base: Path, table: dict[str, Any], place: str) -> str:
    """Return the folder of the model beside which adapters were trained."""
    named = table.get("base_model_name_or_path")
    url = _url_of(base, named) if isinstance(named, str) and named else ""
    if not url or ("://" not in url and not Path(url).is_dir()):
        what = (
            f"base_model_name_or_path is {named!r}, which is no folder here; write its path there, or hf://OWNER/NAME"
        )
        raise ConfigError(_line(what), place)
    return url


def _adapter_of(table: dict[str, Any], model: ModelSpec, place: str) -> AdapterSpec:
    try:
        return adapter_spec(table, model)
    except ValueError as error:
        raise ConfigError(_line(str(error)), place) from error


def _local(base: Path, folder: str) -> str:
    try:
        path = (base / Path(folder).expanduser()).resolve()
        path.exists()  # raises if a name is too long
    except (OSError, RuntimeError, ValueError) as error:  # ~NAME of an unknown user, a loop of links, a zero character
        raise ConfigError(_line(f"is no path: {error}"), "[model] from") from error
    return str(path)


def _model_of(config: dict[str, Any], ignored: Sequence[str], place: str) -> ModelSpec:
    try:
        return model_spec(config, ignored)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(_line(str(error)), place) from error


def _line(text: str) -> str:
    """Return a sentence that quotes a foreign file as one short line, which a terminal can show."""
    short = text if len(text) <= _MAX_SENTENCE else f"{text[:_MAX_SENTENCE]}…"
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in short)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Translate an error about a file of the folder, for the person who named the folder."""
    try:
        yield
    except RecoveryError as error:
        raise ConfigError(error.reason, error.item) from error
