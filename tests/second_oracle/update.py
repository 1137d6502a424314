"""One update of the whole model: which optimizer a parameter has, at which rate (docs/numerics.md, sections 4 to 6)."""

from dataclasses import replace

from torch import Tensor

from tests.second_oracle.error_feedback import ErrorFeedback
from tests.second_oracle.initial_weights import Weights
from tests.second_oracle.job import Group, Job
from tests.second_oracle.learning_rate import factor
from tests.second_oracle.optimizers import OPTIMIZERS

ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def rest_of(job: Job, name: str, weight: Tensor) -> Group:
    """The settings of one parameter of `rest`: some kinds have no weight decay."""
    if name == "mlp.gate.e_score_correction_bias":
        return replace(job.rest, name="lion", lr=job.router_bias_lr, betas=(0.0, 0.0), weight_decay=0.0)
    if name in ROUTERS or weight.dim() == 3:
        return job.rest
    kind = "embeddings" if weight.dim() == 2 else "biases" if name.endswith((".bias", ".sinks")) else "norms"
    has_none = kind in job.undecayed or name == "layer_scalar"
    return replace(job.rest, weight_decay=0.0) if has_none else job.rest


class Update:
    """Δ_b of every parameter, each by itself: 2-D weights of the blocks are `matrices`, the others are `rest`."""

    def __init__(self, job: Job, weights: Weights) -> None:
        self.job = job
        self.parameters = {}
        for layer, parameters in weights.items():
            for name, weight in parameters.items():
                is_matrix = layer.startswith("block.") and weight.dim() == 2 and name not in ROUTERS
                group = job.matrices if is_matrix else rest_of(job, name, weight)
                optimizer = OPTIMIZERS[group.name](group, weight)
                self.parameters[layer, name] = (
                    optimizer,
                    ErrorFeedback(
                        job.error_feedback, job.train.delay, job.train.sync_batches, job.error_feedback_dtype
                    ),
                )

    def __call__(self, b: int, weights: Weights, gradient: Weights) -> Weights:
        """W_{b+1} from W_b, all in float32."""
        rate = factor(
            b,
            schedule=self.job.lr_schedule,
            num_batches=self.job.train.batches,
            warmup=self.job.warmup_batches,
            floor=self.job.lr_floor,
            ends_at=self.job.schedule_batches,
            after_end=self.job.after_end,
        )
        return {
            layer: {name: self._one(b, layer, name, weight, gradient, rate) for name, weight in parameters.items()}
            for layer, parameters in weights.items()
        }

    def _one(self, b: int, layer: str, name: str, weight: Tensor, gradient: Weights, rate: float) -> Tensor:
        optimizer, feedback = self.parameters[layer, name]
        inner = optimizer.updated(weight, gradient[layer][name], lr=optimizer.group.lr * rate)
        optimizer.remembered()
        return feedback.corrected(b, weight, inner)
