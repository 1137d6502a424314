"""Reads a model's whole folder: at the submission for the digests of its parts, in `headway reference` for the weights.

It also checks, when a folder is opened, that it has one set of weights, and exactly those of its config. Faults are
ConfigErrors of one line; of a check, RecoveryErrors. Nodes read single parts (origin_parts.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from headway.daemon.base.errors import RecoveryError
from headway.daemon.cluster.state_key import CARRIED_PART
from headway.daemon.jobs.job import JobSpec, OriginPart
from headway.daemon.models.carried_files import ADAPTER_CONFIG_NAME, CONFIG_NAME
from headway.daemon.models.origin_config import as_config_error
from headway.daemon.models.origin_folder import MissingFileError, OriginFolder
from headway.daemon.models.origin_parts import Range, adapters_of, digest_of, range_of, ranges_of
from headway.daemon.models.tensor_places import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    TIED_NAMES,
    PackedEntry,
    Place,
    find_adapters,
    find_tensors,
    shown,
)
from headway.stages.model.decoder import parameter_shapes, trained_shapes
from headway.stages.model.hugging_face import checkpoint_name
from headway.stages.spec import ModelSpec, layer_names
from headway.stages.state.layer_state import INITIAL, initial_weights
from headway.stages.state.state_file import tensor_of


def check_weights(folder: OriginFolder, model: ModelSpec, *, has_more: bool = False) -> None:
    """Refuse a folder whose tensors are not exactly those of the model, and one that has two sets of weights, or two
    matrices where the model has one, unless they are equal. has_more: it may have a model of pictures beside the text.
    """
    places = find_tensors(folder)
    if places.beside_text and not has_more:
        what = f"has {shown(places.beside_text[0])}, which a model of this {CONFIG_NAME} does not have"
        raise RecoveryError(folder.url, what)
    given = dict(places.tensors)
    if model.tie_word_embeddings and given.keys() >= set(TIED_NAMES):
        matrix, copy = (given[name] for name in TIED_NAMES)
        if not _are_equal(folder, matrix, copy):
            what = f"has {' and '.join(TIED_NAMES)}, which differ, and {CONFIG_NAME} has tie_word_embeddings = true"
            raise RecoveryError(folder.url, f"{what}; set it to false, or delete {TIED_NAMES[1]}")
        del given[TIED_NAMES[1]]
    if folder.has(SINGLE_NAME) and folder.has(INDEX_NAME):
        _check_shards(folder, places.tensors)
    shapes = (
        (checkpoint_name(layer, name, model), tuple(shape))
        for layer in layer_names(model)
        for name, shape in parameter_shapes(layer, model).items()
    )
    _compare(folder, given, shapes, config=CONFIG_NAME)


def check_adapters(folder: OriginFolder, model: ModelSpec) -> None:
    """Refuse a folder whose adapters are not exactly those that its adapter_config.json says."""
    shapes = (
        (checkpoint_name(layer, name, model), tuple(shape))
        for layer in layer_names(model)
        for name, shape in trained_shapes(layer, model).items()
    )
    _compare(folder, find_adapters(folder), shapes, config=ADAPTER_CONFIG_NAME)


def _check_shards(folder: OriginFolder, single: Mapping[str, Place]) -> None:
    """Refuse shards beside a single file that are another set of weights."""
    try:
        shards = find_tensors(folder, is_indexed=True).tensors
    except MissingFileError:
        return  # an index that was left behind: without its shards it is no second set
    for name in sorted(shards.keys() | single.keys()):
        one, other = single.get(name), shards.get(name)
        if one is None or other is None or not _are_equal(folder, one, other):
            what = f"has {SINGLE_NAME} and the shards of {INDEX_NAME}, which differ in {shown(name)}"
            raise RecoveryError(folder.url, f"{what}; delete what is not the model")


def _are_equal(folder: OriginFolder, one: Place, other: Place) -> bool:
    """Return whether two tensors have one dtype, one shape and the same bytes."""
    (file, entry), (other_file, other_entry) = one, other
    if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
        return False
    pieces = folder.read(file, entry.begin, entry.end)
    others = folder.read(other_file, other_entry.begin, other_entry.end)
    if isinstance(entry, PackedEntry) or isinstance(other_entry, PackedEntry):  # one may be in MXFP4
        pieces, others = (iter([b"".join(range_of(folder, "", *each).read())]) for each in (one, other))
    return all(piece == beside for piece, beside in zip(pieces, others, strict=True))


def _compare(
    folder: OriginFolder, given: Mapping[str, Place], shapes: Iterable[tuple[str, tuple[int, ...]]], *, config: str
) -> None:
    """Refuse tensors that are not those that a config asks for. shapes: of these, until one is missing."""
    left = dict(given)
    for name, shape in shapes:  # a tied matrix comes twice
        place = given.get(name)
        left.pop(name, None)
        if place is None:
            raise RecoveryError(folder.url, f"has no tensor {name}, which a model of its {config} has")
        file, entry = place
        if entry.shape != shape:
            what = f"has {name} of shape {list(entry.shape)}, and {config} asks for {list(shape)}"
            raise RecoveryError(folder.named(file), what)
        if entry.dtype not in DTYPES:
            raise RecoveryError(folder.named(file), f"has {name} in {entry.dtype}; read are {', '.join(DTYPES)}")
    for name, (file, _) in left.items():
        raise RecoveryError(folder.named(file), f"has {shown(name)}, which a model of this {config} does not have")


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
