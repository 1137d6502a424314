"""Loads once what torch would load at first use: its compiler's modules, the optimizers' modules, kernels.

An attached process is then ready in milliseconds, which is the purpose of a spare.
"""

import torch

from headway.daemon.runtime.kept_objects import keep_what_stays
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.model.determinism import configure
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState

_MODEL = ModelSpec(
    num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
)
_TRAIN = TrainSpec(batches=1, microbatches=1, microbatch_size=1, sequence_length=4, attention_backend="math")


def warm_up() -> None:
    """Train one batch of the smallest model on the CPU: only the loaded modules stay.

    Modules live as long as the process: the collector is told to skip them, because it runs between two generations.
    """
    cpu = torch.device("cpu")
    configure(_TRAIN, cpu)
    make_optimizer = optimizer_factory(OptimSpec(), num_batches=1, delay=_TRAIN.delay)
    layers = [
        LayerState.initial(LayerName(name), _MODEL, _TRAIN, seed=0, device=cpu, optimizer_factory=make_optimizer)
        for name in layer_names(_MODEL)
    ]
    graph = StageGraph(layers, _MODEL, _TRAIN, is_first=True, is_last=True)
    tokens = torch.zeros((1, _TRAIN.sequence_length), dtype=torch.int64)
    graph.forward((0, 0), Microbatch(tokens, tokens), version=0)
    gradients, _ = graph.backward((0, 0), None)
    graph.update(0, list(gradients))
    del graph, layers, gradients
    keep_what_stays()
