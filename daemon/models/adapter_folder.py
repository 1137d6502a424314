"""Trained adapters as a folder that PEFT opens: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save
from torch import Tensor

from headway.daemon.models.carried_files import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, CONFIG_NAME, PEFT_PREFIX
from headway.daemon.models.model_place import MARK_NAME, PRODUCER, Draft, DraftedFolder, check_place, told_of
from headway.daemon.models.origin_parts import Carried
from headway.daemon.text.data_tokenizer import DataTokenizer
from headway.stages.model.hugging_face import checkpoint_name, is_opened_whole
from headway.stages.spec import MLP_MATRICES, ModelSpec, adapted_names

_OF_MODEL: Final = (CONFIG_NAME, "generation_config.json", "model.safetensors.index.json")


class AdapterFolderWriter(DraftedFolder):
    """Takes layers in any order. A context manager: leaving it puts the folder in its place, unless by an exception."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        base: str,
        tokenizer: DataTokenizer | None = None,
        carried: Carried | None = None,
        force: bool = False,
    ) -> None:
        """base: path or URL of the model beside which the adapters were trained; empty: its weights are random.

        Raises ConfigError for a folder that `check_place` refuses; force: another model in it may be replaced.
        """
        self.is_replacing = check_place(folder, force=force)
        self.folder = folder
        self._spec = spec
        config = (carried or Carried()).files.get(CONFIG_NAME)
        self._is_inside = config is not None and is_opened_whole(json.loads(config))
        self._config = adapter_config(spec, base=base, is_inside=self._is_inside)
        self._files = {name: data for name, data in (carried or Carried()).files.items() if name not in _OF_MODEL}
        if tokenizer is not None:
            self._files |= tokenizer.files(self._files)
        self._mark = {"producer": PRODUCER, "base_model": base}
        self._tensors: dict[str, Tensor] = {}
        with told_of(folder):
            self._draft = Draft(folder)

    def add(self, layer: str, parameters: Mapping[str, Tensor]) -> None:
        """Take a layer's adapters, by parameter name, in float32."""
        for name, tensor in parameters.items():
            key = f"{PEFT_PREFIX}{checkpoint_name(layer, name, self._spec)}"
            if self._is_inside:
                key = key.replace(".model.layers.", ".model.language_model.layers.", 1)
            self._tensors[key] = tensor.detach().cpu().contiguous()

    def close(self) -> None:
        """Write the files and put them in their place. Raises ConfigError."""
        files = self._files | {
            ADAPTER_CONFIG_NAME: (json.dumps(self._config, indent=2) + "\n").encode(),
            MARK_NAME: (json.dumps(self._mark, indent=2) + "\n").encode(),
            ADAPTER_WEIGHTS_NAME: save(dict(sorted(self._tensors.items())), metadata={"format": "pt"}),
        }
        with told_of(self.folder):
            for name, data in files.items():
                (self.draft / name).write_bytes(data)
        self._draft.put_in_place()


def add_last_batch(folder: Path, row: str) -> None:
    """Add the last batch that made adapters, a line of metrics.jsonl, to their folder's mark; a whole model has none.

    Raises ConfigError.
    """
    mark = folder / MARK_NAME
    with told_of(folder):
        if mark.exists():
            told = json.loads(mark.read_text(encoding="utf-8")) | {"last_batch": json.loads(row)}
            draft = mark.with_suffix(".partial")
            draft.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
            draft.replace(mark)


def adapter_config(spec: ModelSpec, *, base: str, is_inside: bool = False) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    is_inside: the base is a model of pictures and text, whose other parts have matrices of the same names.
    """
    adapter = spec.adapter
    targets = [_target(name, spec) for name in adapted_names(spec)]
    return {
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": rf".*\.language_model\..*\.({'|'.join(targets)})" if is_inside else targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": adapter.rslora,
    }


def _target(matrix: str, spec: ModelSpec) -> str:
    """Return a matrix's name for PEFT: the family's, which for an expert's may be w1. PEFT joins what transformers has
    joined, such as the gates of all experts.
    """
    if not spec.has_experts or matrix not in MLP_MATRICES:
        return matrix
    return checkpoint_name("block.0", f"mlp.experts.0.{matrix}.weight", spec).split(".")[-2]
