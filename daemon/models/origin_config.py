"""Opens the folder that `[model] from` names: its config.json, and a check of its tensors, for every command alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.near_path import near
from headway.daemon.jobs.job import OriginSpec
from headway.daemon.jobs.job_file import OpenModel
from headway.daemon.jobs.rules import check_model
from headway.daemon.models.carried_files import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    instead,
    no_such_folder,
)
from headway.stages.model.hugging_face import has_more_than_text, model_spec, text_config
from headway.stages.spec import AdapterSpec, ModelSpec

if TYPE_CHECKING:
    from headway.daemon.models.origin_folder import OriginFolder
import re
import sys

from headway.daemon.jobs.job import JobSpec
from headway.stages.model.hugging_face import checkpoint_name
from headway.stages.spec import MLP_MATRICES, adapted_names, matrix_names


def read_parts(spec: JobSpec) -> JobSpec:
    """Return the job with the digests of its folder, which is read once. Raises ConfigError. Blocks."""
    if not spec.origin.url:
        return spec
    from headway.daemon.base.terminal import behind
    from headway.daemon.models.origin_model import with_parts  # imports torch, which other jobs do not need here

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            drawn = behind(sys.stderr)
            drawn.write(f"\r{spec.origin.url}: part {done}/{total} " + ("\n" if done == total else ""))
            drawn.flush()

    def warn(text: str) -> None:
        sys.stderr.write(f"headway: {text}\n")

    return with_parts(spec, on_part=show, warn=warn)


_READ: Final = frozenset(
    {
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "target_modules",
        "use_rslora",
    }
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "inference_mode",
        "layers_pattern",  # models have one list of blocks
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_ALTERING_STARTS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to draw first adapters that also subtract them from the model's own weights."""
_MERGE: Final = "merge the adapters with PEFT's merge_and_unload(), and begin with the folder that you save then"
_OUTSIDE: Final = ("lm_head", "model.embed_tokens")
"""Modules beside the blocks that PEFT adapts if they are named."""
_MOST_SHOWN: Final = 120
"""Characters of a foreign value that a sentence quotes, so that the remedy after it is seen."""


def adapter_spec(config: dict[str, Any], model: ModelSpec) -> AdapterSpec:
    """Return what an adapter_config.json describes. Raises ValueError, naming key and value, for what is no LoRA."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type = {_shown(config.get('peft_type'))} is not supported; LORA is")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias = {_shown(config['bias'])} is not supported; {_MERGE}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_ALTERING_STARTS):
        what = f"init_lora_weights = {_shown(start)} changed the weights of the model beside the adapters"
        raise ValueError(f"{what}; {_MERGE}")
    for key in sorted(config.keys() - _READ - _WITHOUT_EFFECT):
        if config[key]:
            raise ValueError(f"{key} = {_shown(config[key])} is not supported; {_MERGE}")
    rank, rslora = config.get("r"), config.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r = {_shown(rank)} is no whole number above 0")
    for key in ("lora_alpha", "lora_dropout"):
        if isinstance(config.get(key, 0.0), bool) or not isinstance(config.get(key, 0.0), int | float):
            raise ValueError(f"{key} = {_shown(config[key])} is no number")
    if not isinstance(rslora, bool):
        raise ValueError(f"use_rslora = {_shown(rslora)} is neither true nor false")
    return AdapterSpec(
        rank=rank,
        alpha=float(config.get("lora_alpha", 8)),  # PEFT's own
        rslora=rslora,
        targets=_targets(config, model),
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _targets(config: dict[str, Any], model: ModelSpec) -> tuple[str, ...]:
    """Return the adapted matrices in the module's order; empty: those that a job adapts without `targets`."""
    named, without = config.get("target_modules"), adapted_names(replace(model, adapter=AdapterSpec(rank=1)))
    if isinstance(named, str) and named.lower() == "all-linear":
        return ()
    for module in _OUTSIDE:
        if _is_named(module, named):
            raise ValueError(f"target_modules has {module!r}, and adapters lie beside the blocks' matrices; {_MERGE}")
    found: dict[str, set[bool]] = {name: set() for name in matrix_names(model)}
    for block in range(model.num_hidden_layers):
        for name in matrix_names(model, block):
            found[name].add(_is_adapted(_module(name, block, model), block, config))
    for name, answers in found.items():
        if len(answers) > 1:
            raise ValueError(f"{name} has adapters in some blocks and not in others; {_MERGE}")
    targets = tuple(name for name, answers in found.items() if True in answers)
    if not targets:
        known = ", ".join(_module(name, 0, model).rpartition(".")[2] for name in found)
        raise ValueError(f"target_modules = {_shown(named)} names no matrix of the blocks; there are {known}")
    return () if targets == without else targets


def _is_adapted(module: str, block: int, config: dict[str, Any]) -> bool:
    """Return whether PEFT puts an adapter beside a module of a block."""
    named, chosen = config.get("target_modules"), config.get("layers_to_transform")
    blocks = chosen if isinstance(chosen, list) else [] if chosen is None else [chosen]
    if isinstance(named, list) and blocks and block not in blocks:
        return False
    return _is_named(module, named) and not _is_named(module, config.get("exclude_modules"))


def _is_named(module: str, names: object) -> bool:
    """Return whether names of PEFT have a module: ends of its whole name, or a pattern for it. Raises ValueError."""
    if isinstance(names, str):
        try:
            places = (module, module.replace("model.", "model.language_model.", 1))  # also beside a model of pictures
            return any(re.fullmatch(names, place) for place in places)
        except re.error as error:
            raise ValueError(f"{_shown(names)} is no pattern of modules: {error}") from error
    if names is None:
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{_shown(names)} is no list of modules, such as q_proj")
    return any(f".{module}".endswith(f".{name}") for name in names)


def _module(matrix: str, block: int, model: ModelSpec) -> str:
    """Return a matrix's module in the family's model; for an expert's, that of the first one."""
    part = "linear_attn" if matrix.startswith("in_proj") or matrix == "out_proj" else "self_attn"
    if matrix in MLP_MATRICES:
        part = "mlp.experts.0" if model.has_experts else "mlp"
    return checkpoint_name(f"block.{block}", f"{part}.{matrix}.weight", model).removesuffix(".weight")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MAX_SENTENCE: Final = 500
"""Maximum characters of a sentence about a config: its keys and values may have thousands."""


def model_opener(base: Path, *, on_no_weights: Callable[[ConfigError], None] | None = None) -> OpenModel:
    """Return the reader of folders that a job file names. base: what a relative path is relative to.

    on_no_weights: is told of a config without weights, which is an error otherwise.
    """

    def open_model(folder: str, ignored: Sequence[str] = ()) -> tuple[OriginSpec, ModelSpec]:
        from headway.daemon.models.origin_folder import OriginFolder  # imports fsspec, which most jobs do not need
        from headway.daemon.models.tensor_places import check_adapter_folder, parsed_table

        url, adapter_url, table = _url_of(base, folder), "", None
        if url.endswith(":") or url.startswith("https://huggingface.co/"):
            raise ConfigError("names no folder" if url.endswith(":") else no_such_folder(folder, ""), folder)
        if "://" not in url and not Path(url).exists():
            raise ConfigError(no_such_folder(folder, near(Path(url))), url)
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


def beyond_positions(spec: JobSpec) -> str:
    """Return the remark on sequences that are longer than those on which the model was trained; empty: they are not, or
    its config.json does not say it or cannot be read. Blocks.

    Positions are rotated in every family, so such a model computes any length: no table of them ends.
    """
    longest, rope = None, spec.model.rope_scaling
    if spec.origin.url:
        from headway.daemon.models.origin_folder import OriginFolder  # imports fsspec, which most jobs do not need

        with suppress(ConfigError, RecoveryError, ValueError):
            longest = text_config(_config_of(OriginFolder(spec.origin.url))).get("max_position_embeddings")
    if not isinstance(longest, int):
        return ""
    reach = max(longest, int((rope.original_max_position_embeddings or longest) * rope.factor))
    if spec.train.sequence_length <= reach:
        return ""
    return (
        f"train.sequence_length is {spec.train.sequence_length:,}, and {spec.origin.url} was made for {reach:,} "
        "positions (max_position_embeddings): it computes the others too, but has never seen any"
    )


def _config_of(folder: "OriginFolder") -> dict[str, Any]:
    """Return a folder's config.json. Raises RecoveryError and ConfigError: there is none."""
    from headway.daemon.models.origin_folder import MissingFileError
    from headway.daemon.models.tensor_places import parsed_table

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
    from headway.daemon.models.origin_model import check_adapters, check_weights  # imports torch
    from headway.daemon.models.tensor_places import has_weights

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
