"""The parts of a model's folder as files of boundary 0: one for each layer's weights, one for what an export carries.

Such a file is never written in the folder. Its bytes are a header, then ranges of the folder's files, so each node that
reads the folder can produce, check and send it. The tensors keep the dtype of the folder; they are `initial/<name>`.
A matrix that the job quantizes is in the file as codes and scales, so the checksum in the record is that of these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from headway.daemon.base.errors import RecoveryError
from headway.daemon.cluster.state_key import CARRIED_PART
from headway.daemon.jobs.job import JobSpec
from headway.daemon.models.carried_files import CARRIED, FILE, HEADER, MAX_CARRIED_BYTES
from headway.daemon.models.origin_folder import OriginFolder
from headway.daemon.models.tensor_places import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    PackedEntry,
    TensorEntry,
    TensorPlaces,
    find_adapters,
    find_tensors,
    shown,
)
from headway.stages.errors import MissingPackageError
from headway.stages.model.decoder import frozen_shapes, parameter_shapes, trained_shapes
from headway.stages.model.expert_stacks import from_mxfp4, part_of
from headway.stages.model.hugging_face import layer_parameter
from headway.stages.model.quantized import ABSMAX, quantize, quantized_matrices
from headway.stages.spec import TIED, ModelSpec, whole_layer
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.layer_state import INITIAL
from headway.stages.state.state_file import DTYPE_NAMES, StateHeader, raw_bytes, state_start, tensor_of

if TYPE_CHECKING:
    from torch import Tensor
from dataclasses import field
from pathlib import Path

from headway.daemon.models.origin_config import as_config_error
from headway.stages.state.state_file import read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What an export carries over from the model's folder: bytes by the names of files."""

    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    """All bytes before the data of each file with tensors."""


def carried_in(path: Path) -> Carried:
    """Return the content of the carried part's file. Raises DamagedFileError."""
    _, tensors = read_state(path)
    return _sorted({name: bytes(tensor.numpy()) for name, tensor in tensors.items()})


def carried_of(spec: JobSpec) -> Carried | None:
    """Return what the folder has now; None: the job's weights are random. Raises ConfigError."""
    if not spec.origin.url:
        return None
    with as_config_error():
        folder = OriginFolder(spec.origin.url)
        ranges = ranges_of(folder, CARRIED_PART, model=spec.model)
        return _sorted({name: b"".join(part.read()) for name, part in ranges.items()})


def _sorted(raw: dict[str, bytes]) -> Carried:
    return Carried(
        files={name.removeprefix(FILE): data for name, data in raw.items() if name.startswith(FILE)},
        headers={name.removeprefix(HEADER): data for name, data in raw.items() if name.startswith(HEADER)},
    )


@dataclass(frozen=True, slots=True)
class Range:
    """One tensor of a part, as a range of a file."""

    folder: OriginFolder
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    packed: PackedEntry | None = None
    """What the range has, if that is more than the tensor, or has it in another form."""

    @property
    def size_bytes(self) -> int:
        """Return the number of the tensor's bytes."""
        if self.packed is None:
            return self.end - self.begin
        return prod(self.shape) * (4 if self.dtype == "F32" else 2)

    def read(self, *, skipped_bytes: int = 0) -> Iterator[bytes]:
        """Yield its bytes, piece by piece. Raises RecoveryError."""
        if self.packed is None:
            return self.folder.read(self.file, min(self.begin + skipped_bytes, self.end), self.end)
        return iter([self._unpacked(self.packed)[skipped_bytes:]])

    def _unpacked(self, packed: PackedEntry) -> bytes:
        whole = _whole(self.folder, self.file, self.begin, self.end, self.dtype, packed.stored, packed.scales)
        return bytes(raw_bytes(part_of(whole, packed.part, packed.num_parts), self.dtype))


@lru_cache(maxsize=2)
def _whole(
    folder: OriginFolder,
    file: str,
    begin: int,
    end: int,
    dtype: str,
    stored: tuple[int, ...],
    scales: tuple[str, int, int] | None,
) -> "Tensor":
    """Return what lies in one range of an expert's matrices, outputs first. It is kept, as is its bias, until the other
    part of it is read, which comes next by name.
    """
    raw = b"".join(folder.read(file, begin, end))
    if scales is None:
        return tensor_of(raw, dtype, stored).movedim(-1, 0)
    return from_mxfp4(tensor_of(raw, "U8", stored), tensor_of(b"".join(folder.read(*scales)), "U8", (stored[0], -1)))


def read_part(spec: JobSpec, name: str, *, offset: int = 0, beat: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Yield the file of a part from an offset on, in unverified chunks. beat: is called between two requests.

    Raises RecoveryError: the folder cannot be read, or it is not the one that was submitted.
    """
    expected = spec.origin.digest_of(name)
    if expected is None:
        raise RecoveryError(spec.origin.url, f"has no part {name!r} in the job's record")
    folder = OriginFolder(spec.origin.url, beat=beat)
    part = _Part(spec, name, ranges_of(folder, name, model=spec.model) | adapters_of(spec, name, beat=beat))
    if part.size_bytes != expected.size_bytes:
        raise RecoveryError(folder.url, f"is not the folder that was submitted: {name} has another size")
    head = part.start.signed(expected.checksum)
    if offset < len(head):
        yield head[offset:]
    yield from part.data(skipped_bytes=max(0, offset - len(head)))


def digest_of(spec: JobSpec, name: str, folder: OriginFolder, *, places: TensorPlaces | None = None) -> FileDigest:
    """Return size and checksum of a part, which is read once. places: all tensors, if they are known."""
    part = _Part(spec, name, ranges_of(folder, name, places, model=spec.model) | adapters_of(spec, name))
    for piece in part.data():
        part.start.content.update(piece)
    return FileDigest(size_bytes=part.size_bytes, checksum=part.start.content.hexdigest())


class _Part:
    """A part's file: its start, and its data from the ranges of the folder."""

    def __init__(self, spec: JobSpec, name: str, ranges: dict[str, Range]) -> None:
        self._url = spec.origin.url
        self._ranges = ranges
        self._quantizer = spec.model.adapter.quantize
        frozen = {} if name == CARRIED_PART else frozen_shapes(name, spec.model)
        self._matrices = {f"{INITIAL}/{matrix}" for matrix in quantized_matrices(frozen)}
        self._tensors = {key: (part.dtype, part.shape) for key, part in ranges.items()}
        for matrix in quantized_matrices(frozen):
            for key in (f"{matrix}.weight", f"{matrix}.{ABSMAX}"):
                shape, dtype = frozen[key]
                self._tensors[f"{INITIAL}/{key}"] = (DTYPE_NAMES[dtype], tuple(shape))
        header = StateHeader(job=spec.origin.job, layer=name, boundary=0, timeline=0, dtype=spec.train.dtype)
        self.start = state_start(self._tensors, header)
        self.size_bytes = len(self.start.head) + self.start.data_bytes

    def data(self, *, skipped_bytes: int = 0) -> Iterator[bytes]:
        """Yield the tensors' bytes in the order of their names. Raises RecoveryError."""
        codes = b""
        for key in sorted(self._tensors):
            matrix, _, last = key.rpartition(".")
            if matrix in self._matrices and last in (ABSMAX, "weight"):
                if last == ABSMAX:  # before the matrix's codes, by name
                    codes, piece = self._quantized(f"{matrix}.weight")
                else:
                    codes, piece = b"", codes
                yield piece[skipped_bytes:]
                skipped_bytes = max(0, skipped_bytes - len(piece))
                continue
            part = self._ranges[key]
            yield from part.read(skipped_bytes=skipped_bytes)
            skipped_bytes = max(0, skipped_bytes - part.size_bytes)

    def _quantized(self, key: str) -> tuple[bytes, bytes]:
        """Return the bytes of a matrix's codes and scales."""
        part = self._ranges.get(key)
        if part is None:
            raise RecoveryError(self._url, f"is not the folder that was submitted: {key} is missing")
        matrix = tensor_of(b"".join(part.read()), part.dtype, part.shape)
        try:
            codes, scales = quantize(matrix, self._quantizer)
        except MissingPackageError as error:
            raise RecoveryError(self._url, str(error)) from error
        return codes.numpy().tobytes(), scales.numpy().tobytes()


def ranges_of(
    folder: OriginFolder, name: str, places: TensorPlaces | None = None, *, model: ModelSpec
) -> dict[str, Range]:
    """Return the ranges of a part by the name of the tensor in its file. places: all tensors, if they are known.

    The head's part of a tied model has the embedding's matrix too.
    """
    if name == CARRIED_PART:
        return _carried(folder, places or find_tensors(folder))
    if places is None:
        places = find_tensors(folder, lambda tensor: bool(_parameter_of(name, tensor, model=model)))
        if len(places.tensors) < len(parameter_shapes(name, model)):  # the index lacks some that a shard has
            places = find_tensors(folder)
    found = {}
    for tensor, (file, entry) in places.tensors.items():
        parameter = _parameter_of(name, tensor, model=model)
        if not parameter:
            continue
        found[f"{INITIAL}/{parameter}"] = range_of(folder, tensor, file, entry)
    if not found:
        raise RecoveryError(folder.url, f"has no tensor of {name}")
    return found


def adapters_of(spec: JobSpec, name: str, *, beat: Callable[[], None] = lambda: None) -> dict[str, Range]:
    """Return the ranges of the adapters with which a layer begins; none: the seed says them. Raises RecoveryError."""
    if not spec.origin.adapter or name == CARRIED_PART:
        return {}
    folder = OriginFolder(spec.origin.adapter, beat=beat)
    found = {}
    for tensor, (file, entry) in find_adapters(folder).items():
        place = layer_parameter(tensor, spec.model)
        if place is not None and _is_in(name, *place, spec.model):
            found[f"{INITIAL}/{place[1]}"] = range_of(folder, tensor, file, entry)
    return found


def range_of(folder: OriginFolder, tensor: str, file: str, entry: TensorEntry) -> Range:
    """Return where a tensor's bytes come from. Raises RecoveryError for a dtype that is not read."""
    if entry.dtype not in DTYPES:
        what = f"has {shown(tensor)} in {entry.dtype}; read are {', '.join(DTYPES)}"
        raise RecoveryError(folder.named(file), what)
    packed = entry if isinstance(entry, PackedEntry) else None
    return Range(folder, entry.dtype, entry.shape, file, entry.begin, entry.end, packed)


def _parameter_of(name: str, tensor: str, *, model: ModelSpec) -> str:
    """Return the parameter of a layer that a tensor is; empty: it is none."""
    place = layer_parameter(tensor, model)
    if model.tie_word_embeddings and place == ("head", TIED["head"]):
        return ""  # a second copy of the embedding, which `check_weights` has compared
    if model.tie_word_embeddings and name == "head" and place == ("embed", TIED["embed"]):
        return TIED["head"]
    return place[1] if place is not None and _is_in(name, *place, model) else ""


def _is_in(name: str, layer: str, parameter: str, model: ModelSpec) -> bool:
    """Return whether a layer, or half of one, has a parameter of a whole layer."""
    if name == layer:
        return True
    if whole_layer(name) != layer:
        return False
    return parameter in parameter_shapes(name, model) or parameter in trained_shapes(name, model)


def _carried(folder: OriginFolder, places: TensorPlaces) -> dict[str, Range]:
    found = {}
    for file in CARRIED:
        if not folder.has(file) or (file == INDEX_NAME and SINGLE_NAME in places.headers):
            continue
        size = folder.size_of(file)
        if size > MAX_CARRIED_BYTES:
            raise RecoveryError(folder.named(file), f"has {size} bytes; at most {MAX_CARRIED_BYTES} are carried over")
        found[f"{FILE}{file}"] = Range(folder, "U8", (size,), file, 0, size)
    for file, header in places.headers.items():
        found[f"{HEADER}{file}"] = Range(folder, "U8", (len(header),), file, 0, len(header))
    return found
