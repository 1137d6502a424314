"""Counts the memory that an update takes for a moment, beside the state and the gradient. Pure.

Matrices under Muon are stepped one after the other, as on every card: small matrices that a CPU steps together take no
more than a large one. All other parameters are stepped layer by layer: W_b of a whole layer is kept for Error Feedback.
"""

from collections.abc import Sequence
from typing import Final

from headway.daemon.jobs.job import JobSpec
from headway.optim.spec import GroupSpec

FP32_BYTES: Final = 4
DTYPE_BYTES: Final = {"float32": FP32_BYTES, "bfloat16": 2}


def update_bytes(spec: JobSpec, matrices: Sequence[tuple[int, int]], others: Sequence[int]) -> int:
    """Return the most bytes that one layer's update has beside its state. others: sizes of all but the matrices."""
    group = spec.optim.matrices
    if group.name == "muon":
        most = max((_muon_bytes(spec, *shape) for shape in matrices), default=0)
    else:
        most = _group_bytes(spec, group, [rows * columns for rows, columns in matrices])
    return max(most, _group_bytes(spec, spec.optim.rest, others))


def _muon_bytes(spec: JobSpec, rows: int, columns: int) -> int:
    """Return the bytes for one matrix: the direction and Newton–Schulz, then Error Feedback's difference."""
    group, size = spec.optim.matrices, DTYPE_BYTES[spec.optim.matrices.newton_schulz_dtype]
    number, short = rows * columns, min(rows, columns)
    # Two iterates; the Gram matrix, and the polynomial of it.
    iteration = size * (2 * number + 2 * short * short)
    direction = FP32_BYTES * number if group.nesterov else 0
    return number * _kept(spec, group) + max(direction + iteration, number * _corrected(spec))


def _group_bytes(spec: JobSpec, group: GroupSpec, sizes: Sequence[int]) -> int:
    """Return the bytes for parameters of one layer that are stepped one by one, between two passes over all of them."""
    if not sizes:
        return 0
    *_, second, largest = (0, *sorted(sizes))
    # torch's AdamW holds the divisor of one tensor until that of the next is there.
    stepping = FP32_BYTES * group.kind.step_tensors * largest + (FP32_BYTES * second if group.name == "adamw" else 0)
    return sum(sizes) * _kept(spec, group) + max(stepping, largest * _corrected(spec))


def _kept(spec: JobSpec, group: GroupSpec) -> int:
    """Return the bytes an element from before a step to its end: W_b where masters are stepped in place, and the
    widened momentum.
    """
    before = FP32_BYTES if _has_feedback(spec) and spec.train.dtype == "bfloat16" else 0
    return before + (FP32_BYTES if group.momentum_dtype == "bfloat16" else 0)


def _corrected(spec: JobSpec) -> int:
    """Return the bytes an element while Error Feedback corrects it."""
    if not _has_feedback(spec):
        return 0
    return FP32_BYTES * (2 if spec.optim.error_feedback_dtype == "bfloat16" else 1)


def _has_feedback(spec: JobSpec) -> bool:
    return spec.optim.error_feedback * spec.train.delay > 0
