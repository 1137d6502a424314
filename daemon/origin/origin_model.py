"""Reads a model's whole folder: at the submission for the digests of its parts, in `headway reference` for the weights.

Every fault is a ConfigError of one line. The folder was checked when it was opened (folder_check.py). Nodes read single
parts (origin_parts.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from headway.daemon.jobs.job import JobSpec, OriginPart
from headway.daemon.origin.origin_config import as_config_error
from headway.daemon.origin.origin_folder import OriginFolder
from headway.daemon.origin.origin_parts import Range, adapters_of, digest_of, ranges_of
from headway.daemon.origin.tensor_places import find_tensors
from headway.daemon.storage.state_key import CARRIED_PART
from headway.stages.model.decoder import parameter_shapes, trained_shapes
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

    Raises ConfigError: a tensor is missing or cut off.
    """
    if not spec.origin.url:
        return spec
    names = [*spec.layers, CARRIED_PART]
    parts = []
    with as_config_error():
        folder = OriginFolder(spec.origin.url)
        places = find_tensors(folder)
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

    def read(layer: str) -> dict[str, Tensor]:
        with as_config_error():
            ranges = ranges_of(folder, layer, places, model=spec.model)
            return initial_weights(_tensors_of(ranges), parameter_shapes(layer, spec.model), "cpu")

    return read


def initial_adapters_of(spec: JobSpec) -> Callable[[str], dict[str, Tensor]] | None:
    """Return the reader of the adapters with which each layer begins; None: the seed says them. Raises ConfigError."""
    if not spec.origin.adapter:
        return None

    def read(layer: str) -> dict[str, Tensor]:
        with as_config_error():
            return initial_weights(_tensors_of(adapters_of(spec, layer)), trained_shapes(layer, spec.model), "cpu")

    return read


def _tensors_of(ranges: dict[str, Range]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{INITIAL}/"): tensor_of(b"".join(part.read()), part.dtype, part.shape)
        for name, part in ranges.items()
    }
