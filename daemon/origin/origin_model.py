"""Reads a model's whole folder: at the submission for the digests of its parts, in `headway reference` for the weights.

Every fault is a ConfigError of one line. Nodes read single parts (origin_parts.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from headway.daemon.errors import RecoveryError
from headway.daemon.jobs.job import JobSpec, OriginPart
from headway.daemon.origin.carried_files import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from headway.daemon.origin.origin_config import as_config_error
from headway.daemon.origin.origin_folder import OriginFolder
from headway.daemon.origin.origin_parts import Range, adapters_of, digest_of, ranges_of
from headway.daemon.origin.safetensors_header import shown
from headway.daemon.origin.tensor_places import TIED_NAMES, TensorPlaces, find_adapters, find_tensors, parsed_table
from headway.daemon.storage.state_key import CARRIED_PART
from headway.stages.model.decoder import parameter_shapes, trained_shapes
from headway.stages.model.hugging_face import checkpoint_name, has_more_than_text
from headway.stages.spec import ModelSpec, layer_names
from headway.stages.state.layer_state import INITIAL, initial_weights
from headway.stages.state.state_file import tensor_of


def with_parts(
    spec: JobSpec,
    *,
    on_part: Callable[[int, int], None] = lambda _done, _total: None,
    warn: Callable[[str], None] = lambda _: None,
) -> JobSpec:
    """Return the job with the digest of each part of its folder: the whole model is read once, layer by layer.

    on_part(done, total) reports progress. warn: is told what is left out.

    Raises ConfigError: a tensor is missing, unknown, misshapen or cut off.
    """
    if not spec.origin.url:
        return spec
    names = [*spec.layers, CARRIED_PART]
    parts = []
    with as_config_error():
        folder = OriginFolder(spec.origin.url)
        places = find_tensors(folder)
        _check_tensors(folder, places, spec.model)
        _check_adapters(spec)
        if left := Counter(name.removeprefix("model.").partition(".")[0] for name in places.beside_text):
            told = " and ".join(f"{number} tensors of {part}" for part, number in sorted(left.items()))
            warn(f"{spec.origin.url}: the text model alone is trained and exported; {told} are left out")
        for done, name in enumerate(names):
            on_part(done, len(names))
            digest = digest_of(spec, name, folder, places=places)
            parts.append(OriginPart(name=name, size_bytes=digest.size_bytes, checksum=digest.checksum))
        on_part(len(names), len(names))
    return replace(spec, origin=replace(spec.origin, parts=tuple(parts)))


def initial_weights_of(spec: JobSpec) -> Callable[[str], dict[str, Tensor]] | None:
    """Return the reader of each layer's W_0 in fp32; None: the job's weights are random. Raises ConfigError."""
    if not spec.origin.url:
        return None
    with as_config_error():
        folder = OriginFolder(spec.origin.url)
        places = find_tensors(folder)
        _check_tensors(folder, places, spec.model)

    def read(layer: str) -> dict[str, Tensor]:
        with as_config_error():
            ranges = ranges_of(folder, layer, places, model=spec.model)
            return initial_weights(_tensors_of(ranges), parameter_shapes(layer, spec.model), "cpu")

    return read


def initial_adapters_of(spec: JobSpec) -> Callable[[str], dict[str, Tensor]] | None:
    """Return the reader of the adapters with which each layer begins; None: the seed says them. Raises ConfigError."""
    if not spec.origin.adapter:
        return None
    with as_config_error():
        _check_adapters(spec)

    def read(layer: str) -> dict[str, Tensor]:
        with as_config_error():
            return initial_weights(_tensors_of(adapters_of(spec, layer)), trained_shapes(layer, spec.model), "cpu")

    return read


def _tensors_of(ranges: dict[str, Range]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{INITIAL}/"): tensor_of(b"".join(part.read()), part.dtype, part.shape)
        for name, part in ranges.items()
    }


def _check_adapters(spec: JobSpec) -> None:
    """Refuse a folder whose adapters are not exactly those that its adapter_config.json says."""
    if not spec.origin.adapter:
        return
    folder, model = OriginFolder(spec.origin.adapter), spec.model
    given = {name: (file, entry.shape) for name, (file, entry) in find_adapters(folder).items()}
    _compare(
        folder,
        given,
        {
            checkpoint_name(layer, name, model): tuple(shape)
            for layer in layer_names(model)
            for name, shape in trained_shapes(layer, model).items()
        },
        config=ADAPTER_CONFIG_NAME,
    )


def _check_tensors(folder: OriginFolder, places: TensorPlaces, model: ModelSpec) -> None:
    """Refuse a folder whose tensors are not exactly those of the model."""
    expected = {
        checkpoint_name(layer, name, model): tuple(shape)
        for layer in layer_names(model)
        for name, shape in parameter_shapes(layer, model).items()
    }
    if places.beside_text and not has_more_than_text(_config_of(folder)):
        what = f"has {shown(places.beside_text[0])}, which a model of this config.json does not have"
        raise RecoveryError(folder.url, what)
    is_copy = model.tie_word_embeddings
    given = {
        name: (file, entry.shape)
        for name, (file, entry) in places.tensors.items()
        if not (is_copy and name == TIED_NAMES[1])
    }
    _compare(folder, given, expected, config=CONFIG_NAME)


def _config_of(folder: OriginFolder) -> dict[str, Any]:
    return parsed_table(folder.read_small(CONFIG_NAME, MAX_CONFIG_BYTES), folder.named(CONFIG_NAME))


def _compare(
    folder: OriginFolder,
    given: dict[str, tuple[str, tuple[int, ...]]],
    expected: dict[str, tuple[int, ...]],
    *,
    config: str,
) -> None:
    """Refuse files and shapes of tensors that are not those that a config asks for."""
    for name, (file, shape) in given.items():
        if name not in expected:
            raise RecoveryError(folder.named(file), f"has {shown(name)}, which a model of this {config} does not have")
        if shape != expected[name]:
            what = f"has {shown(name)} of shape {list(shape)}, and {config} asks for {list(expected[name])}"
            raise RecoveryError(folder.named(file), what)
    if missing := [name for name in expected if name not in given]:
        raise RecoveryError(folder.url, f"has no tensor {missing[0]}, which a model of its {config} has")
