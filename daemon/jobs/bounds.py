"""The smallest and largest number that a job may have for each key, with the reason. Pure."""

from typing import Final

AT_LEAST: Final[dict[str, float]] = {
    "job.seed": 0,
    "model.num_hidden_layers": 1,
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_attention_heads": 1,
    "model.num_key_value_heads": 1,
    "model.vocab_size": 2,
    "model.head_dim": 0,
    "model.sliding_window": 0,
    "model.first_window_layer": 0,
    "model.rope_scaling.factor": 0,
    "model.rope_scaling.original_max_position_embeddings": 0,
    "model.rope_scaling.low_freq_factor": 0,
    "model.rope_scaling.high_freq_factor": 0,
    "model.rope_scaling.beta_fast": 0,
    "model.rope_scaling.beta_slow": 0,
    "model.rope_scaling.attention_factor": 0,
    "train.batches": 1,
    "train.microbatches": 1,
    "train.microbatch_size": 1,
    "train.sequence_length": 1,
    "train.clip_norm": 0,
    "train.threads": 1,
    "train.reduction_groups": 1,
    "train.loss_chunk": 0,
    "train.eval_every": 0,
    "optim.error_feedback": 0,
    "optim.warmup_batches": 0,
    "optim.lr_floor": 0,
    "optim.matrices.weight_decay": 0,
    "optim.matrices.newton_schulz_steps": 1,
    "optim.rest.weight_decay": 0,
    "optim.rest.newton_schulz_steps": 1,
    "fault.snapshot_every": 0,
    "fault.checkpoint_every": 0,
    "fault.copies": 1,
    "fault.checkpoints_kept": 1,
    "fault.link_timeout_s": 1,
    "placement.min_nodes": 1,
    "placement.max_nodes": 0,
    "queue.priority": -10,
}
"""Smallest value allowed."""

ABOVE_ZERO: Final[tuple[str, ...]] = (
    "model.rms_norm_eps",
    "model.rope_theta",
    "model.initializer_range",
    "optim.matrices.lr",
    "optim.matrices.eps",
    "optim.rest.lr",
    "optim.rest.eps",
)

_WEIGHTS = "no layer's weights would fit a device"
_OVERFLOW = "float32 overflows beyond it"

AT_MOST: Final[dict[str, tuple[float, str]]] = {
    "job.seed": (2**63 - 1, "a seed has 63 bits"),
    "model.num_hidden_layers": (1024, "the planner weighs every layer against every device"),
    "model.hidden_size": (65_536, _WEIGHTS),
    "model.intermediate_size": (262_144, _WEIGHTS),
    "model.num_attention_heads": (1024, "each head is a matrix product of its own"),
    "model.num_key_value_heads": (1024, "each head is a matrix product of its own"),
    "model.vocab_size": (2**20, _WEIGHTS),
    "model.head_dim": (1024, _WEIGHTS),
    "model.sliding_window": (2**31 - 1, "no sequence is so long"),
    "model.first_window_layer": (1024, "no model has so many blocks"),
    "model.rope_scaling.factor": (1e6, _OVERFLOW),
    "model.rope_scaling.original_max_position_embeddings": (2**31 - 1, "no sequence is so long"),
    "model.rope_scaling.low_freq_factor": (1e6, _OVERFLOW),
    "model.rope_scaling.high_freq_factor": (1e6, _OVERFLOW),
    "model.rope_scaling.beta_fast": (1e6, _OVERFLOW),
    "model.rope_scaling.beta_slow": (1e6, _OVERFLOW),
    "model.rope_scaling.attention_factor": (1e3, _OVERFLOW),
    "model.rms_norm_eps": (1, "it would drown what it is added to"),
    "model.rope_theta": (1e12, _OVERFLOW),
    "model.initializer_range": (100, _OVERFLOW),
    "train.batches": (2**31 - 1, "a boundary's number has 31 bits"),
    "train.microbatches": (2**16 - 1, "a microbatch's number has 16 bits"),
    "train.microbatch_size": (2**16, "its hidden states travel as one tensor"),
    "train.sequence_length": (2**20, "its hidden states travel as one tensor"),
    "train.clip_norm": (1e30, _OVERFLOW),
    "train.loss_chunk": (2**24, "no microbatch has so many tokens"),
    "train.threads": (1024, "no machine has so many cores"),
    "train.reduction_groups": (1024, "each group keeps its own gradient"),
    "optim.error_feedback": (1e3, _OVERFLOW),
    "optim.lr_floor": (1, "it is a share of the rate"),
    "optim.warmup_batches": (2**31 - 1, "a boundary's number has 31 bits"),
    "optim.matrices.lr": (1e3, _OVERFLOW),
    "optim.matrices.weight_decay": (1e3, _OVERFLOW),
    "optim.matrices.eps": (1, "it would drown what it is added to"),
    "optim.matrices.newton_schulz_steps": (100, "each step is three matrix products"),
    "optim.rest.lr": (1e3, _OVERFLOW),
    "optim.rest.weight_decay": (1e3, _OVERFLOW),
    "optim.rest.eps": (1, "it would drown what it is added to"),
    "optim.rest.newton_schulz_steps": (100, "each step is three matrix products"),
    "fault.copies": (16, "each copy is sent over the network"),
    "fault.checkpoints_kept": (1000, "every record of a checkpoint names them all"),
    "fault.snapshot_every": (10**6, "a failure would recompute all of it"),
    "fault.checkpoint_every": (10**6, "all of it would be computed again"),
    "fault.link_timeout_s": (3600, "the job stands still for so long"),
    "placement.min_nodes": (10**4, "no cluster has so many"),
    "placement.max_nodes": (10**4, "no cluster has so many; 0 means no limit"),
    "queue.priority": (10, "priorities go from -10 to 10"),
}
"""Largest value allowed, and the reason."""

MAX_PARAMETERS: Final = 10**13
"""Maximum parameters of a whole model: ten trillion."""
MAX_TOKENS_PER_MICROBATCH: Final = 2**24
MAX_TEXT: Final = 1024
"""Maximum characters of a path, a URL or a site's name."""
MAX_SITES: Final = 1000
