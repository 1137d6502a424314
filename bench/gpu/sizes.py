"""The sizes that the probes use: a card's, and small ones, with which a CPU runs the same code."""

import os
from dataclasses import replace

import torch

from headway.daemon.worker.card_host import card_settings
from headway.stages.links.nccl import SETTINGS
from headway.stages.spec import ModelSpec, TrainSpec

LARGE_CARD_BYTES = 60 << 30
"""From here on a card has room for several processes with a stage of a third of a billion parameters each."""

_LARGE = ModelSpec(
    num_hidden_layers=6,
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=8192,
)
_MIDDLE = replace(
    _LARGE, num_hidden_layers=8, hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_key_value_heads=4
)
_SMALL = ModelSpec(
    num_hidden_layers=3,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)
_BLOCK_OF_8B = ModelSpec(
    num_hidden_layers=1,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=8192,
)


def stage_model(device: str) -> ModelSpec:
    """Return the model of a stage that keeps the device busy."""
    if device == "cpu":
        return _SMALL
    return _LARGE if torch.cuda.get_device_properties(0).total_memory >= LARGE_CARD_BYTES else _MIDDLE


def block_model(device: str) -> ModelSpec:
    """Return a model with one block of 8B size: the largest first operations."""
    return _SMALL if device == "cpu" else _BLOCK_OF_8B


def stage_train(device: str, *, batches: int) -> TrainSpec:
    """Return how a probe's stage trains: on a card 8192 tokens a microbatch. What it leaves open the devices decide."""
    is_cpu = device == "cpu"
    return TrainSpec(
        batches=batches,
        microbatches=4 if is_cpu else 16,
        microbatch_size=2 if is_cpu else 8,
        sequence_length=32 if is_cpu else 1024,
        clip_norm=0.0,
    )


def num_cards(device: str) -> int:
    """Return how many cards a probe has; 0 on the CPU."""
    return 0 if device == "cpu" else torch.cuda.device_count()


def worker_environment(device: str) -> dict[str, str]:
    """Return what a worker has in its environment beside ours."""
    return {} if device == "cpu" else {**SETTINGS, **card_settings(os.environ, "127.0.0.1")}


def first_device(kind: str) -> str:
    """Return torch's name of the first device of a kind."""
    return "cpu" if kind == "cpu" else "cuda:0"


def wait_for(device: str) -> None:
    """Wait for all that was launched."""
    if device != "cpu":
        torch.cuda.synchronize()
