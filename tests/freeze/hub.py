"""What a config.json of the Hub becomes, which ones are refused, and the names of tensors, family by family."""

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.hugging_face import (
    checkpoint_name,
    family_of,
    hugging_face_config,
    layer_parameter,
    model_spec,
)
from headway.stages.spec import ModelSpec, layer_names
from tests.rigs.hub_configs import CONFIGS

ODD: tuple[Any, ...] = (None, 0, 7, 0.5, True, "x", [])


def record() -> dict[str, str]:
    """Each published config, with each of its keys changed, and each model with options of all others."""
    found, specs = {}, dict[str, ModelSpec]()
    for name, config in CONFIGS.items():
        found[name] = _said(lambda config=config: _both_ways(model_spec(config)))  # type: ignore[misc]
        changed = [config | {key: odd} for key, odd in product(config, ODD)]
        changed += [{key: value for key, value in config.items() if key != left_out} for left_out in config]
        found[f"{name}, changed"] = _digest([_said(lambda each=each: model_spec(each)) for each in changed])  # type: ignore[misc]
        try:
            specs[name] = model_spec(config)
        except ValueError:
            continue
    mixed: list[str] = []
    for one, other, field in product(specs.values(), specs.values(), fields(ModelSpec)):
        if (value := getattr(other, field.name)) != getattr(one, field.name):
            try:
                mixed.append(family_of(replace(one, **{field.name: value})))
            except ValueError:
                mixed.append("none")
    return found | {"mixed": _digest(mixed)}


def _both_ways(spec: ModelSpec) -> str:
    config = hugging_face_config(spec, dtype="bfloat16", sequence_length=4096)
    small = replace(spec, num_experts=min(spec.num_experts, 8))
    names = []
    for layer in islice(layer_names(spec), 6):
        for parameter in parameter_shapes(layer, small):
            name = checkpoint_name(layer, parameter, spec)
            assert spec.tie_word_embeddings or layer_parameter(name, spec) == (layer, parameter)
            names.append(name)
    return _digest([spec, sorted(config.items()), names, model_spec(config)])


def _said(make: Callable[[], Any]) -> str:
    try:
        return str(make())
    except (ValueError, KeyError, TypeError) as error:
        return repr(error)


def _digest(things: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(repr, things)).encode()).hexdigest()
