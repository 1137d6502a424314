"""A trained model as a folder that Hugging Face's AutoModelForCausalLM opens, written layer by layer."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOENT
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Size, Tensor
from torch.func import functional_call

from headway.daemon.base.errors import ConfigError
from headway.daemon.models.model_place import (
    CONFIG_NAME,
    INDEX_NAME,
    PRODUCER,
    SINGLE_NAME,
    Draft,
    DraftedFolder,
    check_place,
    share_mode,
    told_of,
)
from headway.daemon.models.origin_parts import Carried
from headway.daemon.models.tensor_places import TensorEntry, tensors_of
from headway.daemon.text.data_tokenizer import DataTokenizer, has_tokenizer
from headway.stages.model.decoder import build_layer, parameter_shapes
from headway.stages.model.expert_stacks import stacked, stacked_shapes, unstacked
from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config, model_spec, text_config
from headway.stages.spec import TIED, ModelSpec, layer_names
from headway.stages.state.state_file import raw_bytes

NUM_BYTES: Final = 256
SHARD_BYTES: Final = 5 * 10**9
"""Largest shard, unless one tensor is larger: some file systems and stores refuse more."""
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of safetensors by those of torch."""
_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}

Shapes = Mapping[str, Sequence[int]]
"""Shapes of the tensors by their names in a checkpoint, in the order of the layers."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    name: str
    header: bytes
    """All bytes before the data."""
    tensors: dict[str, TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole file."""
        return max((entry.end for entry in self.tensors.values()), default=len(self.header))


def planned_shards(
    shapes: Shapes, dtype: Literal["float32", "bfloat16"], *, most_bytes: int = SHARD_BYTES
) -> tuple[Shard, ...]:
    """Return shards in the order of the layers, each filled up before the next begins."""
    item = _ITEM_BYTES[DTYPES[dtype]]
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * item
        if groups[-1] and filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    named = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return tuple(
        _shard(file, {name: shapes[name] for name in sorted(group)}, DTYPES[dtype])
        for file, group in zip(named, groups, strict=True)
    )


def shards_of_origin(headers: Mapping[str, bytes], shapes: Shapes) -> tuple[Shard, ...] | None:
    """Return the shards of the folder with the initial weights; None: they do not have exactly these tensors."""
    shards = []
    for name, header in sorted(headers.items()):
        data = json.loads(header[8:])
        end = max((entry["data_offsets"][1] for key, entry in data.items() if key != "__metadata__"), default=0)
        shards.append(Shard(name, header, tensors_of(header, len(header) + end)))
    found = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    is_same = {name: entry.shape for name, entry in found.items()} == {
        name: tuple(shape) for name, shape in shapes.items()
    }
    return tuple(shards) if is_same and all(entry.dtype in _ITEM_BYTES for entry in found.values()) else None


def _shard(file: str, shapes: Shapes, dtype: str) -> Shard:
    """Return a shard whose header has the bytes that safetensors itself writes."""
    index: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + prod(shape) * _ITEM_BYTES[dtype]
        index[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(index, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    header = len(raw).to_bytes(8, "little") + raw
    return Shard(file, header, tensors_of(header, len(header) + begin))


ExportDtype = Literal["float32", "bfloat16"]
_LONGEST: Final = 131_072
"""transformers' value of Gemma 3, whose config.json may leave it out."""


class ModelFolderWriter(DraftedFolder):
    """Shards of safetensors, written next to the folder's old content, which it replaces when it is complete.

    A context manager: leaving it puts the model in its place, unless an exception leaves it. Memory of one layer is
    enough.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        sequence_length: int,
        tokenizer: DataTokenizer | None = None,
        carried: Carried | None = None,
        dtype: ExportDtype | None = None,
        force: bool = False,
    ) -> None:
        """sequence_length: the longest on which the model was trained. tokenizer: copied into the folder.

        carried: files of the model's origin, which replace ours. dtype: None: that of the origin, else float32.

        Raises ConfigError for a folder that `check_place` refuses; force: another model in it may be replaced.
        """
        self.is_replacing = check_place(folder, force=force)
        self.folder = folder
        self._spec = spec
        if dtype is None and carried is not None and b'"quantization_config"' in carried.files.get(CONFIG_NAME, b""):
            dtype = "bfloat16"  # into which its weights were read
        shapes: Mapping[str, Sequence[int]] = {
            checkpoint_name(layer, name, spec): tuple(shape)
            for layer in layer_names(spec)
            for name, shape in parameter_shapes(layer, spec).items()
        }
        if spec.expert_bias:
            shapes = stacked_shapes(shapes)
        origin = shards_of_origin(carried.headers, shapes) if carried is not None else None
        if origin is not None and (dtype is None or _dtypes(origin) == {DTYPES[dtype]}):
            self._shards, self._is_of_origin = origin, True
        else:
            self._shards, self._is_of_origin = planned_shards(shapes, dtype or "float32"), False
        self._places = {name: shard for shard in self._shards for name in shard.tensors}
        self._left = set(shapes)
        """Tensors that were not added yet."""
        config = hugging_face_config(spec, dtype=dtype or "float32", sequence_length=sequence_length)
        with told_of(folder):
            self._draft = Draft(folder)
        try:
            self._describe(config, tokenizer, carried or Carried(), dtype)
            with told_of(folder):
                for shard in self._shards:
                    with (self.draft / shard.name).open("wb") as file:
                        file.write(shard.header)
                        file.truncate(shard.size_bytes)
        except BaseException:
            self._draft.drop()
            raise

    def _describe(
        self, config: dict[str, Any], tokenizer: DataTokenizer | None, carried: Carried, dtype: ExportDtype | None
    ) -> None:
        files = {name: data for name, data in carried.files.items() if name not in (CONFIG_NAME, INDEX_NAME)}
        if CONFIG_NAME in carried.files:
            config = text_config(json.loads(carried.files[CONFIG_NAME]))
            if not self._is_of_origin:
                config.pop("quantization_config", None)
                config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype or "float32"
        with told_of(self.folder):
            if tokenizer is not None:
                config |= {} if has_tokenizer(files) else tokenizer.special.ids
                files |= tokenizer.files(files)
            if self._is_of_origin and INDEX_NAME in carried.files:
                files[INDEX_NAME] = carried.files[INDEX_NAME]
            elif not self._is_of_origin:
                files[INDEX_NAME] = (json.dumps(self._index(), indent=2) + "\n").encode()
            files[CONFIG_NAME] = (json.dumps(config | {"producer": PRODUCER}, indent=2) + "\n").encode()
            for name, data in files.items():
                _write(self.draft / name, data)

    def _index(self) -> dict[str, Any]:
        num_bytes = sum(entry.end - entry.begin for shard in self._shards for entry in shard.tensors.values())
        weight_map = {name: shard.name for name, shard in sorted(self._places.items())}
        return {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}

    def add(self, layer: str, parameters: Mapping[str, Tensor]) -> None:
        """Write a layer's weights, by parameter name, in the folder's dtype. Layers may come in any order, each once.

        Raises ConfigError when they cannot be written.
        """
        named = {
            checkpoint_name(layer, parameter, self._spec): tensor.detach().cpu()
            for parameter, tensor in parameters.items()
            # the folder has a tied matrix once, as the embedding
            if not (self._spec.tie_word_embeddings and (layer, parameter) == ("head", TIED["head"]))
        }
        pieces = stacked(named) if self._spec.expert_bias else ((name, 0, tensor) for name, tensor in named.items())
        for name, number, tensor in pieces:
            shard = self._places[name]
            entry, shape = shard.tensors[name], tuple(tensor.shape)
            assert shape in (entry.shape, entry.shape[1:]), f"{name} has another shape"
            raw = raw_bytes(tensor, entry.dtype)
            with told_of(self.folder), (self.draft / shard.name).open("r+b") as file:
                file.seek(entry.begin + number * len(raw))
                file.write(raw)
            self._left.discard(name)

    def close(self) -> None:
        """Put the model in its place. Asserts that every layer was added."""
        assert not self._left, f"{min(self._left)} of the model was not written"
        with told_of(self.folder):
            share_mode((self.draft / shard.name for shard in self._shards), like=self.draft / CONFIG_NAME)
        self._draft.put_in_place()


def write_model(
    folder: Path,
    spec: ModelSpec,
    *,
    weights: Mapping[str, Mapping[str, Tensor]],
    sequence_length: int,
    tokenizer: DataTokenizer | None = None,
    carried: Carried | None = None,
) -> None:
    """Write a whole model from memory: layer to parameter name to tensor. carried: as for ModelFolderWriter."""
    with ModelFolderWriter(
        folder, spec, sequence_length=sequence_length, tokenizer=tokenizer, carried=carried
    ) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model folder in memory."""

    spec: ModelSpec
    sequence_length: int
    weights: dict[str, dict[str, Tensor]]
    """Layer to parameter name to fp32 CPU tensor, under Headway's names."""


def read_model(folder: Path) -> LoadedModel:
    """Load a model that ModelFolderWriter wrote. Raises ConfigError for any other folder, or an incomplete one."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        is_single = (folder / SINGLE_NAME).is_file() and not (folder / INDEX_NAME).exists()
        weight_map: dict[str, str] = (
            {"": SINGLE_NAME}
            if is_single
            else json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        )
        spec = model_spec(config)
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise FileNotFoundError(ENOENT, "missing", file)
            tensors |= load_file(folder / file)
        if spec.expert_bias:
            tensors = unstacked(tensors)
        weights = {
            layer: {
                name: _shaped(tensors, checkpoint_name(layer, name, spec), shape)
                for name, shape in parameter_shapes(layer, spec).items()
            }
            for layer in layer_names(spec)
        }
    except FileNotFoundError as error:
        raise ConfigError(f"{Path(error.filename).name} is missing: not a whole model", str(folder)) from error
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing from the model", str(folder)) from error
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise ConfigError(f"not a readable model: {error}", str(folder)) from error
    longest = int(config.get("max_position_embeddings", _LONGEST))
    return LoadedModel(spec=spec, sequence_length=longest, weights=weights)


def _shaped(tensors: Mapping[str, Tensor], name: str, shape: Size) -> Tensor:
    """Return a tensor. Raises KeyError when it is missing, ValueError when it has another shape."""
    if tensors[name].shape != shape:
        raise ValueError(f"{name} is {list(tensors[name].shape)}, and config.json asks for {list(shape)}")
    return tensors[name].float()


def _dtypes(shards: Iterable[Shard]) -> set[str]:
    return {entry.dtype for shard in shards for entry in shard.tensors.values()}


def _write(file: Path, data: bytes) -> None:
    draft = file.with_name(f".{file.name}.part")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def sample(folder: Path, prompt: str, *, num_tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """Return the model's continuation of the prompt. temperature 0 takes the likeliest byte each time.

    Equal arguments give equal text on equal arithmetic. Raises ConfigError for a folder that is not a model of bytes.
    """
    model = read_model(folder)
    if model.spec.vocab_size != NUM_BYTES:
        raise ConfigError(f"has a vocabulary of {model.spec.vocab_size}; only byte tokens can be sampled", str(folder))
    tokens = continued(model, list(prompt.encode()), temperature=temperature, seed=seed)
    return bytes(next(tokens) for _ in range(num_tokens)).decode(errors="replace")


def continued(model: LoadedModel, tokens: list[int], *, temperature: float, seed: int) -> Iterator[int]:
    """Yield tokens after `tokens`, for ever; the model sees the last `sequence_length` of them. No start
    means byte 0.
    """
    layers = {name: build_layer(name, model.spec) for name in layer_names(model.spec)}
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or [0]
    while True:
        with torch.inference_mode():
            hidden = torch.tensor([tokens[-model.sequence_length :]])
            for name, layer in layers.items():
                # The head computes the last position alone.
                hidden = hidden[:, -1:] if name == "head" else hidden
                hidden = functional_call(layer, model.weights[name], (hidden,))
            token = _drawn(hidden[0, 0], temperature=temperature, generator=generator)
        tokens = [*tokens, token]
        yield token


def _drawn(logits: Tensor, *, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator))
