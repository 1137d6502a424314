"""The factor of the learning rate in each update (docs/numerics.md, section 4)."""

from math import ceil, cos, pi


def factor(
    b: int, *, schedule: str, num_batches: int, warmup: int, floor: float, ends_at: int = 0, after_end: str = ""
) -> float:
    """Factor of update b of num_batches. Raises ValueError for an update that the job does not have."""
    if not 0 <= b < num_batches:
        raise ValueError(f"a job of {num_batches} updates has no update {b}")
    if ends_at and b >= ends_at and after_end == "floor":
        return floor
    if ends_at and b >= ends_at:
        return factor(b - ends_at, schedule=schedule, num_batches=num_batches - ends_at, warmup=warmup, floor=floor)
    if ends_at:
        num_batches = ends_at
    if b < warmup:
        return (b + 1) / warmup
    if schedule == "cosine":
        return floor + (1 - floor) * (0.5 * (1 + cos(pi * ((b - warmup) / (num_batches - warmup)))))
    decay = ceil(num_batches / 5)
    if schedule == "wsd" and b >= num_batches - decay:
        return floor + (1 - floor) * ((num_batches - b) / decay)
    return 1.0
