"""Counts the memory that an update takes for a moment, beside the state and the gradient. Pure.

Matrices under Muon and NorMuon are stepped one after the other, as on every card: small matrices that a CPU steps
together take no more than a large one. All other parameters are stepped layer by layer: W_b of a whole layer is kept
for Error Feedback.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

from headway.daemon.jobs.job import JobSpec
from headway.optim.spec import GroupSpec, Shape

FP32_BYTES: Final = 4
DTYPE_BYTES: Final = {"float32": FP32_BYTES, "bfloat16": 2}


def update_bytes(spec: JobSpec, matrices: Sequence[tuple[int, int]], others: Sequence[int]) -> int:
    """Return the most bytes that one layer's update has beside its state. others: sizes of all but the matrices."""
    group = spec.optim.matrices
    if group.kind.is_muon:
        most = max((_group_bytes(spec, group, [shape]) for shape in matrices), default=0)
    else:
        most = _group_bytes(spec, group, matrices)
    return max(most, _group_bytes(spec, spec.optim.rest, [(size,) for size in others]))


def _step_bytes(group: GroupSpec, shape: Shape) -> int:
    """Return the bytes of one parameter's step."""
    number, kind = prod(shape), group.kind
    most_more = max((prod(own) for own in kind.more(shape, group).values()), default=0)
    stepping = FP32_BYTES * max(kind.step_tensors * number, kind.step_more * most_more)
    if not kind.newton_schulz:
        return stepping
    size, short = DTYPE_BYTES[group.newton_schulz_dtype], min(shape)
    # Two iterates; the Gram matrix, and the polynomial of it. Then what is done with the result, widened first.
    iteration = size * (2 * number + 2 * short * short)
    direction = FP32_BYTES * number if group.nesterov or not kind.is_muon else 0
    return direction + max(iteration, stepping + (size * number if size < FP32_BYTES else 0))


def _group_bytes(spec: JobSpec, group: GroupSpec, shapes: Sequence[Shape]) -> int:
    """Return the bytes for parameters of one layer that are stepped one by one, between two passes over all of them,
    each followed by Error Feedback's difference.
    """
    if not shapes:
        return 0
    sizes = [prod(shape) for shape in shapes]
    *_, second, largest = (0, *sorted(sizes))
    # torch's AdamW holds the divisor of one tensor until that of the next is there.
    before = FP32_BYTES * second if group.name == "adamw" else 0
    stepping = max(_step_bytes(group, shape) for shape in shapes) + before
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
