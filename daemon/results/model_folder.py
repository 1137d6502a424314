"""A trained model as a folder that Hugging Face's AutoModelForCausalLM opens, written layer by layer."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Size, Tensor

from headway.daemon.data.data_tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, DataTokenizer
from headway.daemon.errors import ConfigError
from headway.daemon.results.model_place import (
    CONFIG_NAME,
    INDEX_NAME,
    PRODUCER,
    Draft,
    check_place,
    share_mode,
    told_of,
)
from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config, model_spec
from headway.stages.spec import ModelSpec, layer_names


class ModelFolderWriter:
    """One safetensors file per layer, written next to the folder's old content, which it replaces when it is complete.

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
        force: bool = False,
    ) -> None:
        """sequence_length: the longest on which the model was trained. tokenizer: copied into the folder.

        Raises ConfigError for a folder that `check_place` refuses; force: another model in it may be replaced.
        """
        check_place(folder, force=force)
        self.folder = folder
        self._spec = spec
        self._layers = layer_names(spec)
        self._written: dict[str, str] = {}  # checkpoint name → file
        self._num_bytes = 0
        config = hugging_face_config(spec, dtype="float32", sequence_length=sequence_length) | {"producer": PRODUCER}
        with told_of(folder):
            self._draft = Draft(folder)
        try:
            self._describe(config, tokenizer)
        except BaseException:
            self._draft.drop()
            raise

    @property
    def draft(self) -> Path:
        """Return the folder where the model is written; the caller must remove its own files before the model is
        complete.
        """
        return self._draft.folder

    def _describe(self, config: dict[str, object], tokenizer: DataTokenizer | None) -> None:
        with told_of(self.folder):
            if tokenizer is not None:
                config |= tokenizer.special.ids
                told = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special.texts}
                _write_text(self.draft / TOKENIZER_NAME, tokenizer.text)
                _write_text(self.draft / TOKENIZER_CONFIG_NAME, json.dumps(told) + "\n")
            _write_text(self.draft / CONFIG_NAME, json.dumps(config, indent=2) + "\n")

    def add(self, layer: str, parameters: Mapping[str, Tensor]) -> None:
        """Write a layer's weights, by parameter name, unchanged. Layers may come in any order, each once.

        Raises ConfigError when they cannot be written.
        """
        file = f"model-{self._layers.index(layer) + 1:05d}-of-{len(self._layers):05d}.safetensors"
        tensors = {checkpoint_name(layer, name): tensor.contiguous().cpu() for name, tensor in parameters.items()}
        with told_of(self.folder):
            save_file(tensors, self.draft / file, metadata={"format": "pt"})
        self._written.update(dict.fromkeys(tensors, file))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        """Write the index, and put the model in its place. Asserts that every layer was added."""
        assert len(set(self._written.values())) == len(self._layers), "a layer of the model was not written"
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self._written.items()))}
        with told_of(self.folder):
            _write_text(self.draft / INDEX_NAME, json.dumps(index, indent=2) + "\n")
            share_mode((self.draft / file for file in set(self._written.values())), like=self.draft / INDEX_NAME)
        self._draft.put_in_place()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._draft.drop()


def write_model(
    folder: Path,
    spec: ModelSpec,
    *,
    weights: Mapping[str, Mapping[str, Tensor]],
    sequence_length: int,
    tokenizer: DataTokenizer | None = None,
) -> None:
    """Write a whole model from memory: layer to parameter name to tensor."""
    with ModelFolderWriter(folder, spec, sequence_length=sequence_length, tokenizer=tokenizer) as writer:
        for layer, parameters in weights.items():
            writer.add(layer, parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model folder in memory."""

    spec: ModelSpec
    sequence_length: int
    weights: dict[str, dict[str, Tensor]]
    """Layer to parameter name to CPU tensor, under Headway's names."""


def read_model(folder: Path) -> LoadedModel:
    """Load a model that ModelFolderWriter wrote. Raises ConfigError for any other folder, or an incomplete one."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        spec = model_spec(config)
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise FileNotFoundError(ENOENT, "missing", file)
            tensors |= load_file(folder / file)
        weights = {
            layer: {
                name: _shaped(tensors, checkpoint_name(layer, name), shape)
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
    return LoadedModel(spec=spec, sequence_length=int(config["max_position_embeddings"]), weights=weights)


def _shaped(tensors: Mapping[str, Tensor], name: str, shape: Size) -> Tensor:
    """Return a tensor. Raises KeyError when it is missing, ValueError when it has another shape."""
    if tensors[name].shape != shape:
        raise ValueError(f"{name} is {list(tensors[name].shape)}, and config.json asks for {list(shape)}")
    return tensors[name]


def _write_text(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.part")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
