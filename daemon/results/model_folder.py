"""A trained model as a folder that Hugging Face's AutoModelForCausalLM opens, written layer by layer."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Size, Tensor

from headway.daemon.data.data_tokenizer import TOKENIZER_NAME, DataTokenizer
from headway.daemon.errors import ConfigError
from headway.daemon.origin.carried import Carried
from headway.daemon.results.model_place import (
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
from headway.daemon.results.shard_layout import DTYPES, Shard, planned_shards, shards_of_origin
from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.expert_stacks import stacked, stacked_shapes, unstacked
from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config, model_spec, text_config
from headway.stages.spec import TIED, ModelSpec, layer_names
from headway.stages.state.state_file import raw_bytes

ExportDtype = Literal["float32", "bfloat16"]
_LONGEST: Final = 131_072
"""transformers' value of Gemma 3, whose config.json may leave it out."""
_TOKENIZERS: Final = (TOKENIZER_NAME, "tokenizer.model", "vocab.json", "vocab.txt")


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
        has_tokenizer = any(name in files for name in _TOKENIZERS)
        with told_of(self.folder):
            if tokenizer is not None and not has_tokenizer:
                config |= tokenizer.special.ids
                files |= tokenizer.files
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
