"""The best pipeline by trying all of them: the oracle of the planner's search. Slow, and written on its own.

It knows the rules, not the way to the answer: every division of the devices into stages, every cut of the layers, every
division of the reduction groups, each judged against memory and timed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.layer_costs import LayerCost, layer_costs, microbatch_seconds, shareable_part, update_seconds
from headway.stages.schedule.stage_schedule import schedule_depth


@dataclass(frozen=True)
class Instance:
    """A job and the nodes, one device each, in the order of the pipeline."""

    spec: JobSpec
    nodes: tuple[NodeRecord, ...]
    links: LinkAssumptions
    measured: Mapping[tuple[str, str], tuple[float, float]] | None = None
    """(node, kind of layer) → seconds of a microbatch and of an update."""
    num_copies: int = 2
    """Nodes that hold each layer of a boundary."""
    is_in_turn: bool = False
    """Whether no stage may have replicas: then one group is added up after another."""


def divisions(number: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many positive parts."""
    for inner in itertools.combinations(range(1, number), num_parts - 1):
        ends = (0, *inner, number)
        yield tuple(end - first for first, end in itertools.pairwise(ends))


def best_seconds(instance: Instance) -> float:
    """Least predicted seconds of a batch with every node at work, in this order; inf if nothing fits."""
    spec, nodes = instance.spec, instance.nodes
    num_layers, train = len(spec.layers), spec.train
    stage_seconds = lru_cache(maxsize=None)(lambda *place: _stage_seconds(instance, *place))
    best = inf
    for num_stages in range(1, min(len(nodes), num_layers, train.microbatches) + 1):
        for sizes in divisions(len(nodes), num_stages):
            firsts = list(itertools.accumulate(sizes, initial=0))
            runs = list(itertools.pairwise(firsts))
            around = [
                between(instance, nodes[slice(*uppers)], nodes[slice(*lowers)])
                for uppers, lowers in itertools.pairwise(runs)
            ]
            for layers in divisions(num_layers, num_stages):
                spans = itertools.pairwise(itertools.accumulate(layers, initial=0))
                times = [
                    stage_seconds(*run, *span, num_stages - index)
                    for index, (run, span) in enumerate(zip(runs, spans, strict=True))
                ]
                slowest = max([*times, *(seconds for seconds, _ in around)])
                if train.delay:
                    best = min(best, slowest)
                else:
                    filled = slowest * (1 + (num_stages - 1) / train.microbatches)
                    best = min(best, filled + sum(trip for _, trip in around))
    return best


def between(instance: Instance, uppers: Sequence[NodeRecord], lowers: Sequence[NodeRecord]) -> tuple[float, float]:
    """(seconds to carry a batch, round trip) between the nodes of two stages."""
    model, train = instance.spec.model, instance.spec.train
    size = 2 if train.dtype == "bfloat16" else 4
    carried = train.microbatches * train.microbatch_size * train.sequence_length * model.hidden_size * size
    links = instance.links
    is_far = any(upper.site != lower.site for upper in uppers for lower in lowers)
    bandwidth = links.far_bytes_per_s if is_far else links.site_bytes_per_s
    num_links = min(len(uppers), len(lowers))
    return carried / num_links / bandwidth, links.far_round_trip_s if is_far else links.site_round_trip_s


def _stage_seconds(instance: Instance, first_node: int, end_node: int, first: int, end: int, num_stages: int) -> float:
    """Under the best division of the groups, and the best choice of what to compute again; inf where there is none."""
    spec, train = instance.spec, instance.spec.train
    if train.recompute == "auto":
        place = first_node, end_node, first, end, num_stages
        specs = [replace(spec, train=replace(train, recompute=each)) for each in train.recomputes]
        return min(_stage_seconds(replace(instance, spec=each), *place) for each in specs)
    run = instance.nodes[first_node:end_node]
    num_groups = train.reduction_groups
    if len(run) > (1 if instance.is_in_turn else num_groups) or len({node.arithmetic_class for node in run}) > 1:
        return inf
    depth = schedule_depth(train.schedule, train.microbatches, num_stages, 0)
    alone = _replicated_seconds(instance, run, first, end, depth, is_shared=False)
    shared = _replicated_seconds(instance, run, first, end, depth, is_shared=True)
    return shared if shares_update(instance, (first, end), alone, shared) else alone


def shares_update(instance: Instance, span: tuple[int, int], alone: float, shared: float) -> bool:
    """Whether a stage's replicas share its update, by the least seconds of a batch with and without."""
    costs, wish = layer_costs(instance.spec)[slice(*span)], instance.spec.placement.share_updates
    if wish == "never" or not any(cost.update_flops for cost in costs):
        return False
    return shared < inf if wish == "always" else shared < alone * 0.98


def _replicated_seconds(
    instance: Instance, run: Sequence[NodeRecord], first: int, end: int, depth: int, *, is_shared: bool
) -> float:
    train, best = instance.spec.train, inf
    if is_shared and len(run) == 1:
        return inf
    for counts in divisions(train.reduction_groups, len(run)):
        ends = list(itertools.accumulate(counts, initial=0))
        slowest = 0.0
        for node, bounds in zip(run, itertools.pairwise(ends), strict=True):
            groups, sharing = range(*bounds), len(run) if is_shared else 1
            if not fits_in(instance, node, first, end, groups, len(run), depth, is_shared=is_shared):
                break
            slowest = max(slowest, worker_seconds(instance, node, first, end, groups, num_sharing=sharing))
        else:
            best = min(best, slowest)
    reducing = reduction_seconds(instance, run, first, end, is_shared=is_shared)
    return max(best, reducing) if train.delay else best + reducing


def reduction_seconds(
    instance: Instance, run: Sequence[NodeRecord], first: int, end: int, *, is_shared: bool = False
) -> float:
    """Of a batch, between the replicas of a stage, which may share the update."""
    if len(run) == 1:
        return 0.0
    links, num = instance.links, len(run)
    bandwidth = links.site_bytes_per_s if len({node.site for node in run}) == 1 else links.far_bytes_per_s
    num_parameters = sum(cost.num_parameters for cost in layer_costs(instance.spec)[first:end])
    # Of 1 / R of the layers: sums sent by all, reduced ones by all.
    slices = instance.spec.train.reduction_groups * (num - 1) / num + (num - 1)
    shares = sum(cost.shared_bytes for cost in layer_costs(instance.spec)[first:end]) if is_shared else 0
    return (4 * num_parameters * slices / num + shares * (num - 1) / num) / bandwidth


def worker_seconds(
    instance: Instance, node: NodeRecord, first: int, end: int, groups: range, *, num_sharing: int = 1
) -> float:
    """Of a batch, on a worker that computes some groups' microbatches, and orthogonalises with so many others."""
    train, seconds, orthogonalizing = instance.spec.train, 0.0, 0.0
    costs = layer_costs(instance.spec)[first:end]
    num_microbatches = sum(i % train.reduction_groups in groups for i in range(train.microbatches))
    for cost in costs:
        known = (instance.measured or {}).get((node.name, cost.name.partition(".")[0]))
        if known is None:
            known = microbatch_seconds(cost, node.devices[0], train), update_seconds(cost, node.devices[0], train)
        seconds += num_microbatches * known[0] + known[1]
        orthogonalizing += known[1] * shareable_part(cost, node.devices[0], train)
    if num_sharing == 1 or not orthogonalizing:
        return seconds
    largest = max(cost.largest_update_flops for cost in costs) / sum(cost.update_flops for cost in costs)
    # The one with the most gets the largest matrix when all have an equal part of the rest.
    own = largest + (1 - largest) / num_sharing
    return seconds - orthogonalizing * (1 - own)


def fits_in(
    instance: Instance,
    node: NodeRecord,
    first: int,
    end: int,
    groups: Sequence[int],
    num_replicas: int,
    depth: int,
    *,
    is_shared: bool,
) -> bool:
    """As `fits`, for the copies and the sums of an instance."""
    return fits(
        instance.spec,
        node,
        first,
        end,
        groups,
        num_replicas,
        depth,
        is_shared=is_shared,
        num_copies=instance.num_copies,
        is_in_turn=instance.is_in_turn,
    )


def fits(
    spec: JobSpec,
    node: NodeRecord,
    first: int,
    end: int,
    groups: Sequence[int],
    num_replicas: int,
    depth: int,
    *,
    is_shared: bool = False,
    num_copies: int = 2,
    is_in_turn: bool = False,
) -> bool:
    """Whether a worker of a stage of this depth has room on its device and in its machine."""
    train, costs = spec.train, layer_costs(spec)[first:end]
    # Of as many groups: those that have most microbatches.
    num_held = sum(i % train.reduction_groups < len(groups) for i in range(train.microbatches))
    held = min(depth, ceil(depth * num_held / train.microbatches) + 1)
    sums, own = float(min(len(groups), 2) if is_in_turn else len(groups)), len(groups)
    received = (train.reduction_groups - own) / num_replicas
    if num_replicas > 1 and train.delay:
        sums += max(
            own + 2 * received * (num_replicas - 2) / (num_replicas - 1),
            own - own / num_replicas + received + 1 / num_replicas,
            2 * received,
        )
    elif num_replicas > 1:
        sums += received
    needed = sum(cost.resident_bytes + sums * cost.group_bytes + held * cost.activation_bytes for cost in costs)
    passing = backward_moment(costs) - sum(cost.activation_bytes + cost.backward_bytes for cost in costs)
    # While a layer is updated, there is neither a backward's gradient nor what it takes for a moment.
    backward = sum(cost.backward_bytes for cost in costs)
    needed += max(passing, max(cost.moment_bytes for cost in costs) - backward)
    if num_replicas > 1:
        # A batch ends: sums are there twice, with a row for their mean.
        reducing = 2 * own + 1 + (2 if train.delay else 1) * received
        in_flight = held - 1 if train.delay else 0
        ending = sum(
            cost.resident_bytes + reducing * cost.group_bytes + in_flight * cost.activation_bytes for cost in costs
        )
        needed = max(needed, ending - backward)
    if is_shared:
        needed += sum(cost.shared_bytes for cost in costs)
    states = 3 * num_copies if num_copies > 1 else 4
    kept = (states if spec.fault.snapshot_every else 2) * sum(cost.state_bytes for cost in costs)
    limit = node.devices[0].usable_bytes
    return not (limit and int(needed) > limit) and not (node.memory_bytes and kept > node.memory_bytes)


def backward_moment(costs: Sequence[LayerCost]) -> int:
    """Bytes of a microbatch when its backward has the most: activations up to a layer, and gradients from it on."""
    return max(
        sum(below.activation_bytes for below in costs[: index + 1])
        + sum(above.backward_bytes for above in costs[index:])
        + cost.passing_bytes
        for index, cost in enumerate(costs)
    )


def orders(nodes: Sequence[NodeRecord], length: int) -> Iterator[tuple[NodeRecord, ...]]:
    """All orders of so many nodes, also those that leave a site and come back: the planner tries each of so few."""
    return itertools.permutations(nodes, length)
