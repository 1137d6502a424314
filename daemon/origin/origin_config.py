"""Opens the folder that `[model] from` names: its config.json, and a check of its tensors, for every command alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.jobs.job import OriginSpec
from headway.daemon.jobs.job_file import OpenModel
from headway.daemon.jobs.rules import check_model
from headway.daemon.origin.adapter_origin import adapter_spec
from headway.daemon.origin.carried_files import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from headway.daemon.origin.folder_kinds import instead, no_such_folder
from headway.stages.model.hugging_face import has_more_than_text, model_spec
from headway.stages.spec import AdapterSpec, ModelSpec

if TYPE_CHECKING:
    from headway.daemon.origin.origin_folder import OriginFolder

_MAX_SENTENCE: Final = 500
"""Maximum characters of a sentence about a config: its keys and values may have thousands."""


def model_opener(base: Path, *, on_no_weights: Callable[[ConfigError], None] | None = None) -> OpenModel:
    """Return the reader of folders that a job file names. base: what a relative path is relative to.

    on_no_weights: is told of a config without weights, which is an error otherwise.
    """

    def open_model(folder: str, ignored: Sequence[str] = ()) -> tuple[OriginSpec, ModelSpec]:
        from headway.daemon.origin.origin_folder import OriginFolder  # imports fsspec, which most jobs do not need
        from headway.daemon.origin.tensor_places import check_adapter_folder, parsed_table

        url, adapter_url, table = _url_of(base, folder), "", None
        if url.endswith(":") or url.startswith("https://huggingface.co/"):
            raise ConfigError("names no folder" if url.endswith(":") else no_such_folder(folder), folder)
        if "://" not in url and not Path(url).exists():
            raise ConfigError(no_such_folder(folder), url)
        if "://" not in url and not Path(url).is_dir():
            raise ConfigError("is a file; name the folder in which it lies", url)
        with as_config_error():
            opened = OriginFolder(url)
            if opened.has(ADAPTER_CONFIG_NAME):
                place, adapter_url = f"{url}/{ADAPTER_CONFIG_NAME}", url
                check_adapter_folder(opened)
                table = parsed_table(opened.read_small(ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES), place)
                url = _base_of(base, table, place)
                opened = OriginFolder(url)
            config = _config_of(opened)
            model = _model_of(config, ignored, opened.named(CONFIG_NAME))
            if table is not None:
                model = replace(model, adapter=_adapter_of(table, model, f"{adapter_url}/{ADAPTER_CONFIG_NAME}"))
        adapters = OriginFolder(adapter_url) if adapter_url else None
        _check(opened, adapters, model, on_no_weights, has_more=has_more_than_text(config))
        return OriginSpec(url=url, adapter=adapter_url), model

    return open_model


def _config_of(folder: "OriginFolder") -> dict[str, Any]:
    """Return a folder's config.json. Raises RecoveryError and ConfigError: there is none."""
    from headway.daemon.origin.origin_folder import MissingFileError
    from headway.daemon.origin.tensor_places import parsed_table

    try:
        raw = folder.read_small(CONFIG_NAME, MAX_CONFIG_BYTES)
    except MissingFileError as error:
        raise ConfigError(f"{error.reason}; {instead(folder.names(), folder.url)}", error.item) from error
    return parsed_table(raw, folder.named(CONFIG_NAME))


def _check(
    folder: "OriginFolder",
    adapters: "OriginFolder | None",
    model: ModelSpec,
    on_no_weights: Callable[[ConfigError], None] | None,
    *,
    has_more: bool,
) -> None:
    """Raise ConfigError unless the model can be computed and its folders have its tensors. on_no_weights: as above."""
    from headway.daemon.origin.folder_check import check_adapters, check_weights  # imports torch
    from headway.daemon.origin.tensor_places import has_weights

    check_model(model, folder.named(CONFIG_NAME))  # its size is bounded from here on
    try:
        with as_config_error():
            if adapters is not None:
                check_adapters(adapters, model)
            check_weights(folder, model.base, has_more=has_more)
    except ConfigError as error:
        if on_no_weights is None or has_weights(folder):
            raise
        on_no_weights(error)


def whole_path(folder: str | None) -> str:
    """Return the folder of `--model`, which is relative to the working folder; empty: none was given."""
    if folder is None:
        return ""
    return folder if "://" in folder else _local(Path.cwd(), folder)


def _url_of(base: Path, folder: str) -> str:
    path = folder.removeprefix("file://") or folder  # of this machine, so `~` is this user's
    return path.rstrip("/") if "://" in path else _local(base, path)


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
    except (ValueError, OverflowError) as error:  # a number may have thousands of digits
        raise ConfigError(_line(str(error)), place) from error


def _local(base: Path, folder: str) -> str:
    try:
        path = (base / Path(folder).expanduser()).resolve()
        path.exists()  # raises if a name is too long
    except (OSError, RuntimeError, ValueError) as error:  # ~NAME of an unknown user, a loop of links, a zero character
        raise ConfigError(_line(f"{folder[:80]!r} is no path: {error}"), "[model] from") from error
    return str(path)


def _model_of(config: dict[str, Any], ignored: Sequence[str], place: str) -> ModelSpec:
    text = config.get("text_config")
    has = config.keys() | (text.keys() if isinstance(text, dict) else set())
    if absent := [key for key in ignored if key not in has]:
        raise ConfigError(_line(f"has no key {absent[0]!r}, which [model] ignore names; leave it out"), place)
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
