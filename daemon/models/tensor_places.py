"""Finds the place of each tensor in a model's folder: one safetensors file, or several with an index.

A foreign header is read, or refused by one sentence that says what is wrong with it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

from headway.daemon.base.errors import RecoveryError
from headway.daemon.models.carried_files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    PEFT_PREFIX,
    instead,
)
from headway.daemon.models.origin_folder import MissingFileError, OriginFolder
from headway.stages.model.families import EXPERT_PARTS, EXPERT_STACK, MOST_EXPERTS

MAX_HEADER_BYTES: Final = 16 << 20
"""Maximum size of a header: a hundred thousand tensors take 12 MB."""
LFS_START: Final = b"version https://git-lfs"
LFS_POINTER: Final = "is a pointer of git-lfs, not the file; run `git lfs pull` there, or `hf download` the model again"
DTYPES: Final = ("F32", "BF16", "F16")
"""Those of weights that are read."""
MAX_NAME: Final = 512
_MAX_DIMENSIONS: Final = 8
_MAX_ELEMENTS: Final = 1 << 48
_ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class HeaderError(ValueError):
    """A wrong header, described by the end of a sentence about its file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    """As safetensors names it: `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def header_bytes(start: bytes, size_bytes: int) -> int:
    """Return how many bytes stand before the data. start: the file's first 8 bytes. Raises HeaderError."""
    if size_bytes < 8 or len(start) < 8:
        raise HeaderError(f"is truncated: {size_bytes} bytes")
    if start[:8] == LFS_START[:8]:
        raise HeaderError(LFS_POINTER)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if length > size_bytes - 8:
        raise HeaderError(f"is truncated: its header has {length} bytes, and the file {size_bytes}")
    return 8 + length


def tensors_of(header: bytes, size_bytes: int) -> dict[str, TensorEntry]:
    """Return the tensors of a file in the order of their data. header: all bytes before the data.

    Raises HeaderError unless each byte of the data belongs to exactly one tensor.
    """
    try:
        index = json.loads(header[8:], object_pairs_hook=unique_keys)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"has a header that is not JSON ({type(error).__name__})") from error
    if not isinstance(index, dict):
        raise HeaderError("has a header that is not a table")
    index.pop("__metadata__", None)
    found = {name: _entry(name, raw, len(header)) for name, raw in index.items()}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_cover(ordered, begin=len(header), end=size_bytes)
    return ordered


def shown(name: str) -> str:
    """Return a foreign name as one short printable word."""
    text = repr(name[:80])[1:-1]
    return text if len(name) <= 80 else f"{text}…"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises HeaderError for a name that it has twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise HeaderError(f"names {shown(key)} twice")
    return table


def _entry(name: str, raw: Any, header: int) -> TensorEntry:
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise HeaderError(f"has a tensor with the impossible name {shown(name)}")
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"has no dtype, shape and data_offsets of {shown(name)}")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise HeaderError(f"has {shown(name)} in the unknown dtype {shown(str(dtype))}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
        raise HeaderError(f"has {shown(name)} of an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise HeaderError(f"has impossible data_offsets of {shown(name)}")
    begin, end = offsets
    if end - begin != prod(shape) * _ITEM_BYTES[dtype]:
        raise HeaderError(f"gives {shown(name)} {end - begin} bytes, and its shape {shape} in {dtype} takes others")
    return TensorEntry(dtype, tuple(shape), header + begin, header + end)


def _are_sizes(raw: object) -> bool:
    return isinstance(raw, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in raw)


def _check_cover(tensors: dict[str, TensorEntry], *, begin: int, end: int) -> None:
    """Refuse tensors that share bytes, and bytes of no tensor."""
    last = max((entry.end for entry in tensors.values()), default=begin)
    if last > end:
        raise HeaderError(f"is truncated: its tensors end at byte {last}, and it has {end}")
    for (one, before), (other, after) in pairwise(tensors.items()):
        if after.begin < before.end:
            raise HeaderError(f"has {shown(one)} and {shown(other)} in the same bytes")
    ends = [begin, *(entry.end for entry in tensors.values())]
    begins = [*(entry.begin for entry in tensors.values()), end]
    if ends != begins:
        raise HeaderError("has bytes that belong to no tensor")


INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
PICKLED_NAME: Final = "adapter_model.bin"
MAX_INDEX_BYTES: Final = 32 << 20
MAX_FILES: Final = 2000
MAX_TENSORS: Final = 1 << 18
"""Maximum tensors of a folder, each expert's counted by itself: the largest mixtures have a hundred thousand."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", re.ASCII)
_COMPUTED: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that old versions of transformers have saved, though they follow from the config."""


_TEXT_PREFIX: Final = re.compile(r"(model\.language_model|language_model\.model)\.")
"""Before the names of the text model, in a folder with a model of pictures and text: new and old."""
_BESIDE_TEXT: Final = re.compile(
    r"(model\.)?(visual|(vision|audio)_tower|embed_(vision|audio)|multi_modal_projector)\.|mtp\."
)
TIED_NAMES: Final = ("model.embed_tokens.weight", "lm_head.weight")
"""The names under which a checkpoint may have a tied matrix."""
Place = tuple[str, TensorEntry]
"""A tensor's file, and its entry there."""


@dataclass(frozen=True, slots=True)
class PackedEntry(TensorEntry):
    """A matrix or a bias of one expert in a file of gpt-oss: every num_parts-th output of what the range has.

    dtype and shape are the matrix's own, begin and end those of what has it: see stages/model/expert_stacks.py.
    """

    stored: tuple[int, ...]
    """Shape of the range's values; in MXFP4 of its bytes."""
    part: int
    num_parts: int
    scales: tuple[str, int, int] | None
    """File and range of the scales; None: the range is no MXFP4."""


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """The tensors of a folder that were asked for."""

    tensors: dict[str, Place]
    """File and entry, by the tensor's name."""
    headers: dict[str, bytes]
    """All bytes before the data, by file."""
    beside_text: tuple[str, ...] = ()
    """Names of tensors for pictures, and for several tokens at once. The text model does not have them."""


def has_weights(folder: OriginFolder) -> bool:
    """Return whether a folder has a file of weights, or an index of such files. Raises RecoveryError."""
    return folder.has(SINGLE_NAME) or folder.has(INDEX_NAME)


def find_tensors(
    folder: OriginFolder, is_wanted: Callable[[str], bool] = lambda _: True, *, is_indexed: bool = False
) -> TensorPlaces:
    """Return the places of the tensors with such names; no other file is opened.

    is_indexed: of the shards of the index, even if a single file lies beside them. Raises RecoveryError.
    """
    is_single = not is_indexed and folder.has(SINGLE_NAME)  # transformers takes it too, whatever lies beside it
    weight_map = _weight_map(folder) if is_indexed or (not is_single and folder.has(INDEX_NAME)) else None
    if weight_map is None and not is_single:
        if not folder.has(CONFIG_NAME):
            raise RecoveryError(folder.url, f"is missing, or has no {CONFIG_NAME} any more")
        what = f"has neither {SINGLE_NAME} nor {INDEX_NAME}"
        raise MissingFileError(folder.url, f"{what}; {instead(folder.names(), folder.url)}")
    headers: dict[str, bytes] = {}
    tensors = _members_of(folder, _places_of(folder, weight_map, is_wanted, headers=headers))
    beside_text = tuple(name for name in tensors if _BESIDE_TEXT.match(name))
    for name in beside_text:
        del tensors[name]
    return TensorPlaces(tensors, headers, beside_text)


def _places_of(
    folder: OriginFolder,
    weight_map: Mapping[str, str] | None,
    is_wanted: Callable[[str], bool] = lambda _: True,
    *,
    headers: dict[str, bytes] | None = None,
) -> dict[str, Place]:
    """Return the places of tensors in the shards of an index, or in the single file, and add their `headers`."""
    tensors: dict[str, Place] = {}
    for file in [SINGLE_NAME] if weight_map is None else _files(weight_map, is_wanted):
        try:
            header, found = _read_header(folder, file)
        except MissingFileError as error:
            what = f"{error.reason}, and {INDEX_NAME} names it; {instead((), folder.url)}"
            raise MissingFileError(error.item, what) from error
        if headers is not None:
            headers[file] = header
        if weight_map is not None:
            _compare(folder, file, found, weight_map)
        is_transposed = any(name.endswith("_proj_bias") for name in weight_map or found)  # as gpt-oss alone has them
        for raw, whole in found.items():
            for name, entry in [(_text_name(raw), whole)] if is_transposed else _experts_of(_text_name(raw), whole):
                if not is_wanted(name) or _COMPUTED.fullmatch(name):
                    continue
                if len(tensors) >= MAX_TENSORS:
                    what = f"has more than {MAX_TENSORS} tensors, the most that are read"
                    raise RecoveryError(folder.named(file), what)
                if name in tensors:
                    raise RecoveryError(folder.named(file), f"has {shown(raw)}, and there is {shown(name)} already")
                tensors[name] = (file, entry)
    return tensors


def _experts_of(name: str, whole: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """Yield each expert's matrices of a tensor that has those of all experts one after another; else the tensor."""
    found = EXPERT_STACK.fullmatch(name)
    if found is None or len(whole.shape) != 3 or 0 in whole.shape or whole.shape[0] > MOST_EXPERTS:
        yield name, whole
        return
    parts = EXPERT_PARTS[found[2]]
    num_experts, rows, columns = whole.shape
    rows, size = rows // len(parts), (whole.end - whole.begin) // (num_experts * len(parts))
    for number in range(num_experts * len(parts)):
        expert, part = divmod(number, len(parts))
        begin = whole.begin + number * size
        entry = TensorEntry(dtype=whole.dtype, shape=(rows, columns), begin=begin, end=begin + size)
        yield f"{found[1]}.{expert}.{parts[part]}.weight", entry


def _members_of(folder: OriginFolder, tensors: dict[str, Place]) -> dict[str, Place]:
    """Return each expert's matrices and biases in place of gpt-oss's tensors of all experts of a block."""
    made: dict[str, Place] = {}
    for name, (file, whole) in tensors.items():
        found = EXPERT_STACK.fullmatch(name)
        scales = tensors.get(f"{name.removesuffix('_blocks')}_scales")
        if found is not None and found[3] == "_scales":
            continue  # with the blocks
        if found is None or not _is_stack(whole, scales and scales[1], found[3] or ""):
            made[name] = (file, whole)
            continue
        parts, last = EXPERT_PARTS[found[2]], "bias" if found[3] == "_bias" else "weight"
        if len(made) + len(parts) * whole.shape[0] > MAX_TENSORS:
            raise RecoveryError(folder.named(file), f"has more than {MAX_TENSORS} tensors, the most that are read")
        for number in range(whole.shape[0]):
            for part, kind in enumerate(parts):
                member = f"{found[1]}.{number}.{kind}.{last}"
                if member in tensors or member in made:
                    raise RecoveryError(folder.named(file), f"has {shown(name)}, and there is {shown(member)} already")
                made[member] = (file, _member(whole, scales, number, part=part, num_parts=len(parts)))
    return made


def _is_stack(whole: TensorEntry, scales: TensorEntry | None, kind: str) -> bool:
    """Return whether a tensor is what its name says, so far as its shape tells."""
    if 0 in whole.shape or len(whole.shape) < 2 or whole.shape[0] > MOST_EXPERTS:
        return False
    if kind == "_blocks":
        is_fp4 = whole.shape[-1] == 16 and len(whole.shape) == 4 and whole.dtype == "U8"
        return is_fp4 and scales is not None and (scales.dtype, scales.shape) == ("U8", whole.shape[:-1])
    return len(whole.shape) == {"": 3, "_bias": 2}.get(kind, 0)


def _member(whole: TensorEntry, scales: Place | None, number: int, *, part: int, num_parts: int) -> PackedEntry:
    """Return one of the parts of an expert. Each expert's values lie in a row."""
    (begin, end), stored, of_scales = _slice(whole, number), whole.shape[1:], None
    inputs, outputs, dtype = stored[:-1], stored[-1], whole.dtype
    if scales is not None:
        inputs, outputs, dtype = (32 * stored[1],), stored[0], "BF16"
        stored, of_scales = (outputs, 16 * stored[1]), (scales[0], *_slice(scales[1], number))
    return PackedEntry(
        dtype=dtype,
        shape=(outputs // num_parts, *inputs),
        begin=begin,
        end=end,
        stored=stored,
        part=part,
        num_parts=num_parts,
        scales=of_scales,
    )


def _slice(whole: TensorEntry, number: int) -> tuple[int, int]:
    size = (whole.end - whole.begin) // whole.shape[0]
    return whole.begin + number * size, whole.begin + (number + 1) * size


def find_adapters(folder: OriginFolder) -> dict[str, Place]:
    """Return the places of the adapters of a folder of PEFT, by their names in a checkpoint. Raises RecoveryError."""
    _, found = _read_header(folder, ADAPTER_WEIGHTS_NAME)
    adapters: dict[str, Place] = {}
    for raw, entry in found.items():
        name = _text_name(raw.removeprefix(PEFT_PREFIX))
        if name in adapters:
            what = f"has {shown(raw)}, and there is {shown(name)} already"
            raise RecoveryError(folder.named(ADAPTER_WEIGHTS_NAME), what)
        adapters[name] = (ADAPTER_WEIGHTS_NAME, entry)
    return adapters


def check_adapter_folder(folder: OriginFolder) -> None:
    """Refuse adapters beside whole weights, and those in a format that is not read. Raises RecoveryError."""
    if whole := [name for name in (SINGLE_NAME, INDEX_NAME) if folder.has(name)]:
        what = f"has {ADAPTER_CONFIG_NAME} and {whole[0]}; delete the one with which the job is not to begin"
        raise RecoveryError(folder.url, what)
    if not folder.has(ADAPTER_WEIGHTS_NAME) and folder.has(PICKLED_NAME):
        code = f"save_file(torch.load('{PICKLED_NAME}', weights_only=True), '{ADAPTER_WEIGHTS_NAME}')"
        command = f'python -c "import torch; from safetensors.torch import save_file; {code}"'
        raise RecoveryError(folder.url, f"has {PICKLED_NAME}, which is not read; run this in it once: {command}")


def _text_name(name: str) -> str:
    """Return a tensor's name in a folder of its text model alone."""
    found = _TEXT_PREFIX.match(name)
    return f"model.{name[found.end() :]}" if found else name.removeprefix("language_model.")


def _files(weight_map: Mapping[str, str], is_wanted: Callable[[str], bool]) -> list[str]:
    return sorted({file for name, file in weight_map.items() if is_wanted(_text_name(name))})


def _weight_map(folder: OriginFolder) -> dict[str, str]:
    """Return the file of each tensor. A file's name may lead nowhere else."""
    place = folder.named(INDEX_NAME)
    raw = parsed_table(folder.read_small(INDEX_NAME, MAX_INDEX_BYTES), place)
    weight_map: Any = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RecoveryError(place, "weight_map is missing, or is not a table of tensors")
    if (number := len(weight_map)) > MAX_TENSORS:
        raise RecoveryError(place, f"weight_map names {number} tensors; at most {MAX_TENSORS} are read")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise RecoveryError(place, f"weight_map[{shown(name)}] = {shown(str(file))} is no file of this folder")
    if (number := len(set(weight_map.values()))) > MAX_FILES:
        raise RecoveryError(place, f"weight_map names {number} files; at most {MAX_FILES} are read")
    return weight_map


def parsed_table(raw: bytes, place: str) -> dict[str, Any]:
    """Return a JSON object. Raises RecoveryError, naming the place, for anything else."""
    if raw.startswith(LFS_START):
        raise RecoveryError(place, LFS_POINTER)
    try:
        table = json.loads(raw, object_pairs_hook=unique_keys)
    except HeaderError as error:
        raise RecoveryError(place, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise RecoveryError(place, f"is not JSON ({type(error).__name__})") from error
    if not isinstance(table, dict):
        raise RecoveryError(place, "is not a JSON object")
    return table


def _read_header(folder: OriginFolder, file: str) -> tuple[bytes, dict[str, TensorEntry]]:
    size = folder.size_of(file)
    try:
        start = b"".join(folder.read(file, 0, min(8, size)))
        header = start + b"".join(folder.read(file, 8, header_bytes(start, size)))
        return header, tensors_of(header, size)
    except HeaderError as error:
        raise RecoveryError(folder.named(file), str(error)) from error


def _compare(folder: OriginFolder, file: str, found: Mapping[str, TensorEntry], weight_map: Mapping[str, str]) -> None:
    """Refuse an index that names what a file does not have. The reverse is taken, as transformers takes it."""
    named = {name for name, place in weight_map.items() if place == file}
    if missing := sorted(named - found.keys()):
        raise RecoveryError(folder.named(file), f"lacks {shown(missing[0])}, which {INDEX_NAME} says is in it")
