"""Decides how many microbatches a stage may have in flight. Pure."""

import math
from collections.abc import Sequence

from headway.stages.spec import ScheduleName


def replica_depth(stage_depth: int, *, num_held: int, num_microbatches: int) -> int:
    """Return how many microbatches a replica may have in flight that computes num_held of its stage's.

    This is its share of the stage's depth, and one more, because its microbatches do not come evenly.
    """
    return min(stage_depth, math.ceil(stage_depth * num_held / num_microbatches) + 1)


def schedule_depth(schedule: ScheduleName, m: int, p: int, s: int, round_trips_in_microbatches: float = 0.0) -> int:
    """Return how many microbatches stage s of p needs in flight with constant times and m microbatches a batch.

    round_trips_in_microbatches: the sum of the round trips of the links downstream of s, over a microbatch's time.
    """
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, p - s)
    return min(2 * m, p - s + math.ceil(round_trips_in_microbatches))


def depths_with_slack(
    schedule: ScheduleName, needed: Sequence[int], m: int, num_replicas: Sequence[int] = ()
) -> list[int]:
    """Return how many microbatches each stage may have in flight, from its need with constant times.

    Times do vary. Under 2bw every stage but the last gets one more for itself and one for each stage after it. Then an
    operation that ends late leaves no other stage without work. This holds only as far as a batch has more microbatches
    than the first stage needs, and one. Two batches take at least one batch of work and one way through the pipe. With
    no more microbatches than are under way, unneeded forwards would run ahead of backwards for which the next batch
    waits.

    num_replicas: of each stage, if not one. R replicas have R microbatches at work, and unlike neighbours hand them
    over unevenly: such a stage counts as R.
    """
    if schedule != "2bw":
        return list(needed)
    p, most = len(needed), max(0, 1 + m - needed[0])
    slacks = [sum(num_replicas[s:]) if num_replicas else p - s for s in range(p - 1)]
    return [depth + min(slack, most) for depth, slack in zip(needed, [*slacks, 0], strict=True)]
