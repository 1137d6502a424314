"""Plans which device holds which layers: the best order of devices, cut, replicas and depth for a job. Pure.

The rule: of all plans within memory, take the least predicted seconds of a batch. A plan with fewer workers is
preferred while it is not more than `WORTH_A_STAGE` slower. Among equals, the plan with fewest links through relays
wins, then the plan that leaves most layers in place, then the one whose nodes hold most of their layers' files.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Final, Unpack

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.records import NodeRecord, WorkerPart
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused, StageEstimate, size
from headway.daemon.plan.connections import Links
from headway.daemon.plan.devices import DeviceSlot, Kinds, natural
from headway.daemon.plan.host_memory import HostWidths, kept_by, rooms_beside, rooms_of
from headway.daemon.plan.paths import NOTHING_BLOCKED, REMEDY, Pair, pair_of
from headway.daemon.plan.plan_question import Conditions, PlanQuestion, ask
from headway.daemon.plan.predicted_time import (
    PlacedStage,
    PredictedTime,
    depths_within_memory,
    device_bytes_of,
    place,
    with_best_recompute,
)
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.search import WORTH_A_STAGE, AtHome, Search
from headway.daemon.plan.stage_costs import StageCosts
from headway.daemon.plan.stage_memory import HOST_STATES
from headway.stages.links.codec import Codec, is_rounding
from headway.stages.spec import MLP_HALF, TrainSpec

WORTH_A_CUT: Final = 1.01
"""Cuts inside blocks must make a batch at least this many times faster."""
MOST_NAMED: Final = 4
"""Maximum number of devices named in one sentence."""
LEAST_CHUNK: Final = 64
"""Rows of the smallest `loss_chunk` that is proposed."""
FEW_WITH_BLOCKED: Final = 5
"""With more devices than this, if some cannot talk, sets that can all talk are tried too: not every order is tried."""

__all__ = ["WORTH_A_STAGE", "ClusterPlan", "PlanRefused", "StageEstimate", "answer", "make_plan", "size"]


def make_plan(
    spec: JobSpec,
    nodes: Iterable[NodeRecord],
    *,
    profiles: Profiles | None = None,
    **conditions: Unpack[Conditions],
) -> ClusterPlan | PlanRefused:
    """Return the best plan for a job.

    nodes: all present nodes. Left out are draining and quarantined ones, those of another protocol version or of a site
    that the job does not want, and devices that have no worker process. previous: the plan in force, whose layers
    should stay. busy: (node, device) that other jobs use. history: arithmetic classes on which the job has run.
    was_rounded: whether it has run over a lossy wire. held: per node, the layers whose files it need not fetch.
    profiles: measurements of devices and links. blocked: blocked ways between nodes; none of them is between neighbours
    or replicas of the plan.
    """
    return answer(ask(spec, nodes, profiles=profiles, **conditions))


def answer(question: PlanQuestion) -> ClusterPlan | PlanRefused:
    """Return the best plan. With many devices it takes seconds: do not call it in a thread that others wait for."""
    plan = _plan(question)
    if isinstance(plan, PlanRefused) and not plan.is_final:
        return replace(plan, reason="; ".join([plan.reason, *question.left_out]))
    return plan


@lru_cache(maxsize=1024)
def _plan(question: PlanQuestion) -> ClusterPlan | PlanRefused:
    spec = question.spec
    most = min(len(spec.layers), spec.train.microbatches) * spec.train.reduction_groups
    if spec.placement.min_nodes > most:
        stages = f"{len(spec.layers)} layers and {spec.train.microbatches} microbatches allow "
        if spec.train.reduction_groups == 1:
            why = f"{stages}{counted(most, 'stage')} at most"
        else:
            why = f"{stages}{counted(most, 'worker')} at most, {spec.train.reduction_groups} on each stage"
        return PlanRefused(reason=f"min_nodes = {spec.placement.min_nodes}, but {why}", is_final=True)
    if spec.train.exactness == "required":
        return _plan_exactly(question)
    return _Planner(question, tuple(question.slots)).plan()


def _plan_exactly(question: PlanQuestion) -> ClusterPlan | PlanRefused:
    """Return the best plan on devices of one arithmetic class: the job's own class, once it has one."""
    history, slots = question.history, question.slots
    classes = sorted({slot.arithmetic_class for slot in slots})
    allowed = [name for name in classes if set(history) <= {name}]
    if not allowed:
        if classes and history:
            return PlanRefused(
                reason=f'exactness = "required" and the job began on {" and ".join(history)}, which no free device has'
            )
        return PlanRefused(reason=_waits_for_nodes(question.spec, ()))
    by_class = [tuple(slot for slot in slots if slot.arithmetic_class == name) for name in allowed]
    plans = [_Planner(question, alike).plan() for alike in by_class]
    fitting = [plan for plan in plans if isinstance(plan, ClusterPlan)]
    if fitting:
        return min(fitting, key=lambda plan: plan.predicted_batch_seconds)
    refused = plans[0]
    if len(allowed) > 1 and isinstance(refused, PlanRefused):
        return PlanRefused(reason=f'exactness = "required", and on devices of one class alone it {refused.reason}')
    return refused


class _Planner:
    """One search: a job's costs on one set of devices."""

    def __init__(self, question: PlanQuestion, slots: tuple[DeviceSlot, ...]) -> None:
        self._question = question
        self._spec = question.spec
        self._slots = slots
        profiles = question.profiles
        self._pairs = question.blocked.pairs
        links = Links(
            question.links,
            profiles,
            self._pairs,
            relayed=question.relayed,
            by_grpc=self._spec.train.link == "grpc",
        )
        self._costs = StageCosts(self._spec, slots, profiles, links, num_copies=question.num_copies)
        self._alone_costs = self._costs if self._costs.num_groups == 1 else self._costs.without_replicas()

    def plan(self) -> ClusterPlan | PlanRefused:
        placement = self._spec.placement
        if len({slot.node for slot in self._slots}) < max(1, placement.min_nodes):
            return PlanRefused(reason=_waits_for_nodes(self._spec, self._slots))
        if sum(placement.replicas) > len(self._slots):
            return PlanRefused(reason=self._too_few_for_the_shape())
        found = None if self._has_homeless_layer() else self._best_along(self._slots)
        if self._pairs and (found is None or len(self._slots) > FEW_WITH_BLOCKED):
            among = self._best_along(all_talking(self._slots, self._pairs))
            found = min(filter(None, (found, among)), key=lambda plan: plan.predicted_batch_seconds, default=None)
        if found is None and self._is_refused_by_blocked_ways():
            return PlanRefused(reason=self._who_cannot_talk())
        return found or PlanRefused(reason=self._memory_arithmetic())

    def _best_along(self, slots: tuple[DeviceSlot, ...]) -> ClusterPlan | None:
        """Return the best plan on some of the devices, whose machines have room for what they keep."""
        widths = HostWidths(slots)
        while True:
            placed = self._best_within(widths.slots())
            if not placed or not widths.narrow(self._costs, placed):
                break
        if not placed:
            return None
        costs = self._alone_costs if all(len(stage.workers) == 1 for stage in placed) else self._costs
        question = self._question
        return assemble(costs, placed, self._slots, question.history, was_rounded=question.was_rounded)

    def _best_within(self, slots: tuple[DeviceSlot, ...]) -> tuple[PlacedStage, ...]:
        """Return the stages of the best pipeline on some of the devices, each within its own memory; empty: none."""
        choices, is_limited = self._costs.slices.recomputes, self._costs.memory.is_limited
        plain = [self._costs]
        if is_limited and self._costs.num_groups > 1 and not self._spec.placement.replicas:
            plain.append(self._alone_costs)  # what stages have room for depends on whether any has replicas
        fixed = []
        if len(choices) > 1 and is_limited:
            # A stage that computes more again has room for more microbatches in flight. So each choice that a job could
            # fix is planned like a fixed one, and then each stage may have a better one.
            fixed = [costs.with_recompute(choice) for costs in plain for choice in choices]
        found = filter(None, (self._searched(costs, slots) for costs in (*plain, *fixed)))
        _, placed = min(found, key=itemgetter(0), default=(0.0, ()))
        if not placed or not fixed:
            return placed
        costs = self._alone_costs if all(len(stage.workers) == 1 for stage in placed) else self._costs
        return with_best_recompute(costs, placed)

    def _searched(
        self, costs: StageCosts, slots: tuple[DeviceSlot, ...]
    ) -> tuple[float, tuple[PlacedStage, ...]] | None:
        """Return the seconds and the stages of the best pipeline on some of the devices."""
        question = self._question
        profiled = frozenset(node for pair, _ in question.profiles.links for node in pair)
        entrance = question.relayed.entrance
        kinds = Kinds(costs.pace_of, distinct_nodes=profiled, blocked=self._pairs, entrance=entrance)
        names = self._spec.layers
        found = Search(costs, slots, kinds, AtHome(names, question.previous, question.holdings)).best()
        if self._spec.placement.split_blocks:
            # Whole blocks are half as many: their search goes further, and what has no gain is not cut.
            firsts = [at for at, name in enumerate(names) if not name.endswith(f".{MLP_HALF}")]
            at_home = AtHome(tuple(names[at] for at in firsts), question.previous, question.holdings)
            whole = Search(costs.with_whole_blocks(), slots, kinds, at_home).best()
            if whole is not None and (found is None or found.seconds * WORTH_A_CUT > whole.seconds):
                places = [*firsts, len(names)]
                spans = tuple((places[first], places[end]) for first, end in whole.cut.spans)
                found = replace(whole, cut=replace(whole.cut, spans=spans))
        return None if found is None else (found.seconds, place(costs, found.cut))

    def _is_refused_by_blocked_ways(self) -> bool:
        """Return whether a plan would exist if all nodes could talk."""
        if not self._pairs:
            return False
        open_question = replace(self._question, blocked=NOTHING_BLOCKED)
        return isinstance(_Planner(open_question, self._slots).plan(), ClusterPlan)

    def _who_cannot_talk(self) -> str:
        ways = self._question.blocked.among(slot.node for slot in self._slots)
        wanted = self._spec.placement.min_nodes
        demand = f" for min_nodes = {wanted}" if wanted > 1 else ""
        return f"finds no order of nodes{demand} in which neighbours can talk: {ways}; {REMEDY}"

    def _too_few_for_the_shape(self) -> str:
        wanted, here = self._spec.placement.replicas, len(self._slots)
        return (
            f"waits for {counted(sum(wanted) - here, 'more free device')}: "
            f"replicas = {list(wanted)} asks for {sum(wanted)} workers, {here} free"
        )

    def _memory_arithmetic(self) -> str:
        """Return why nothing fits, with the numbers of the largest layer and of the whole."""
        costs = self._costs
        largest = max(range(costs.num_layers), key=lambda layer: (self._alone(layer, layer + 1), -layer))
        whole = self._alone(0, costs.num_layers)
        limits = [slot.limit_bytes for slot in self._slots if slot.limit_bytes]
        hosts = rooms_of(self._slots)
        kept = self._kept(0, costs.num_layers)
        kept_of_one, heaviest = max((self._kept(at, at + 1), at) for at in range(costs.num_layers))
        of_hosts = (
            f"does not fit: the boundary states that nodes keep of it need {size(kept)} of their host memory, and "
        )
        together, most = sum(hosts.values()), max(hosts.values(), default=0)
        all_limited = hosts.keys() == {slot.machine for slot in self._slots}
        if all_limited and (kept > together or kept_of_one > most):
            there = f"{size(together)} together for that, {size(most)} the largest"
            if kept_of_one > most:
                there += f", too little for {costs.slices.layers[heaviest].name} alone, {size(kept_of_one)}"
            return f"{of_hosts}{_named(self._hosts())} {there}{self._layer_folders()}{self._fewer_states()}"
        if hosts and (not limits or self._fits_without_hosts(self._hosts())):
            few = self._hosts() if len(self._hosts()) <= MOST_NAMED else []
            if short := [name for name in few if self._fits_without_hosts([name])]:
                return f"{of_hosts}{_named(short)} too little for its part{self._layer_folders()}"
            devices = counted(len(self._slots), "free device")
            return f"{of_hosts}no order of {devices} has room for its part{self._layer_folders()}"
        if not limits:
            return "finds no set of nodes that fulfils [placement]"
        is_uneven = whole <= sum(limits) and self._alone(largest, largest + 1) <= max(limits)
        uneven = "; no cut into whole layers fits, each device with microbatches of its own" if is_uneven else ""
        return (
            f"does not fit: its layers need {size(whole)} on devices at one microbatch in flight "
            f"({costs.slices.layers[largest].name} alone {size(self._alone(largest, largest + 1))}), and "
            f"{self._free_devices()} {size(sum(limits))}"
            f"{' and more' if len(limits) < len(self._slots) else ''} together, {size(max(limits))} the largest"
            f"{self._reserve()}{self._shortage()}{uneven}; {self._smaller_chunk(max(limits))}{remedy(self._spec.train)}"
        )

    def _hosts(self) -> list[str]:
        """Return the nodes whose memory limits what they keep."""
        return sorted({slot.node for slot in self._slots if slot.host_memory_bytes}, key=natural)

    def _fits_without_hosts(self, names: Collection[str]) -> bool:
        """Return whether there would be a plan if these nodes had memory for any boundary state."""
        slots = tuple(replace(slot, host_memory_bytes=0) if slot.node in names else slot for slot in self._slots)
        return isinstance(_Planner(self._question, slots).plan(), ClusterPlan)

    def _kept(self, first: int, end: int) -> int:
        """Return the least bytes of the boundary states that a node keeps of layers."""
        number = self._costs.slices.slice_of[first, end]
        return int(min(self._costs.memory.host_bytes(slot)[number] for slot in self._slots))

    def _fewer_states(self) -> str:
        """Return which settings of the job would keep less, and how much they would; empty: none."""
        memory, number = self._costs.memory, self._costs.slices.slice_of[0, self._costs.num_layers]
        if not memory.takes_snapshots:
            return ""
        state, is_pinned = int(memory.state_bytes[number]), any(slot.device.kind == "cuda" for slot in self._slots)
        fewer = [("copies = 1", memory.num_states + is_pinned)] if memory.num_copies > 1 else []
        fewer.append(("snapshot_every = 0", HOST_STATES))
        told = [f"{setting} keeps {size(states * state)}" for setting, states in fewer]
        return f"; under [fault], {' and '.join(told)}"

    def _layer_folders(self) -> str:
        """Return the folders of layer files that have less room than their nodes' memory; empty: none has."""
        named = {slot.layer_folder: slot for slot in self._slots if slot.layer_folder}
        rooms = rooms_of(self._slots)
        told = [f"{folder} of {slot.node} has {size(rooms[slot.machine])}" for folder, slot in named.items()]
        more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
        advice = "more room there, or another store_dir, would help"
        return f": {', '.join(told[:MOST_NAMED])}{more}; {advice}" if told else ""

    def _shortage(self) -> str:
        """Return which devices have less room than their own since memory ran out there; empty: none has."""
        short = [
            f"{slot.node}:{slot.device.index} at most {size(slot.limit_bytes)}"
            for slot in self._slots
            if slot.limit_bytes and slot.limit_bytes != slot.device.usable_bytes
        ]
        more = f" and {len(short) - MOST_NAMED} more" if len(short) > MOST_NAMED else ""
        return f"; out of memory there before, plans give {', '.join(short[:MOST_NAMED])}{more}" if short else ""

    def _smaller_chunk(self, most_bytes: int) -> str:
        """Return the largest `loss_chunk` with which the head fits on the largest device; empty: it does, or never.

        most_bytes: of that device.
        """
        train, head = self._spec.train, self._costs.num_layers - 1
        rows = train.loss_chunk or train.microbatch_size * train.sequence_length
        if train.compile or train.has_own_loss or self._alone(head, head + 1) <= most_bytes:
            return ""
        while (rows := 1 << (rows - 1).bit_length() - 1) >= LEAST_CHUNK:
            spec = replace(self._spec, train=replace(train, loss_chunk=rows))
            if _Planner(replace(self._question, spec=spec), self._slots)._alone(head, head + 1) <= most_bytes:
                return f"the head alone would fit with loss_chunk = {rows}; "
        return ""

    def _reserve(self) -> str:
        kept = sum(slot.device.reserve_bytes for slot in self._slots)
        return f", beside {size(kept)} in reserve" if kept else ""

    def _free_devices(self) -> str:
        return f"{len(self._slots)} free device{'s have' if len(self._slots) != 1 else ' has'}"

    def _alone(self, first: int, end: int) -> int:
        """Return the bytes of layers on the most demanding device, at one microbatch in flight."""
        return round(self._least_bytes(first, end) * max(slot.demand for slot in self._slots))

    def _least_bytes(self, first: int, end: int) -> float:
        costs = self._costs if self._spec.placement.replicas else self._alone_costs
        return min(
            costs.memory.device_bytes(costs.slices.slice_number((first, end), choice), 1, range(costs.num_groups))
            for choice in costs.slices.recomputes
        )

    def _has_homeless_layer(self) -> bool:
        """Return whether a layer fits on no device by itself, so that no order of devices need be tried."""
        if self._costs.num_groups > 1:  # a replica may need less
            return False
        rooms = {(slot.limit_bytes, slot.demand) for slot in self._slots}
        needs = {self._least_bytes(layer, layer + 1) for layer in range(self._costs.num_layers)}
        return any(all(0 < limit < need * demand for limit, demand in rooms) for need in needs)


def _named(nodes: Sequence[str]) -> str:
    """Return `a, b and 3 more nodes have`."""
    more = [counted(len(nodes) - MOST_NAMED, "more node")] if len(nodes) > MOST_NAMED else []
    *others, last = [*nodes[:MOST_NAMED], *more]
    return f"{', '.join(others)} and {last} have" if others else f"{last} has"


def remedy(train: TrainSpec) -> str:
    """Return what would make a job need less memory, or give it more."""
    ways = ['recompute = "auto"'] if "block" not in train.recomputes else []
    ways += ["a smaller microbatch_size"] if train.microbatch_size > 1 else []
    return f"{', '.join([*ways, 'more devices'])} or devices with more memory would help"


def all_talking(slots: tuple[DeviceSlot, ...], pairs: frozenset[Pair]) -> tuple[DeviceSlot, ...]:
    """Return the seats that remain when the one with most blocked pairs is removed, repeatedly, until all can talk."""
    left = list(slots)
    while True:
        counts = [sum(one is not other and pair_of(one.node, other.node) in pairs for other in left) for one in left]
        if not any(counts):
            return tuple(left)
        left.pop(max(range(len(left)), key=lambda index: (counts[index], natural(left[index].node), index)))


def _waits_for_nodes(spec: JobSpec, slots: tuple[DeviceSlot, ...]) -> str:
    here = len({slot.node for slot in slots})
    wanted = max(1, spec.placement.min_nodes)
    missing = wanted - here
    where = f" of {' or '.join(spec.placement.sites)}" if spec.placement.sites else ""
    return f"waits for {missing} {'more ' if here else ''}node{'s' if missing > 1 else ''}{where}" + (
        f" (min_nodes = {wanted}, {here} free)" if wanted > 1 else ""
    )


def assemble(
    costs: StageCosts,
    placed: Sequence[PlacedStage],
    slots: Sequence[DeviceSlot],
    history: tuple[str, ...],
    *,
    was_rounded: bool = False,
) -> ClusterPlan:
    """Return the plan of some stages. seats: all usable devices. history: arithmetic classes on which the job has run.

    was_rounded: whether the job has run over a lossy wire.
    """
    times = PredictedTime(costs, placed)
    depths = depths_within_memory(costs, placed, times)
    hosts = kept_by(costs, placed), rooms_beside(placed, slots)
    estimates = tuple(
        _estimate(costs, placed, times, depths, hosts, index, position)
        for index, stage in enumerate(placed)
        for position in range(len(stage.workers))
    )
    order = [slot for stage in placed for slot in stage.slots]
    distance = times.distance(depths)
    classes = tuple(sorted({*history, *(slot.arithmetic_class for slot in order)}))
    used = {slot.node for slot in order}
    codecs = [costs.cuts.codec(upper.slots, lower.slots) for upper, lower in pairwise(placed)]
    rounding = _rounding_reason(costs.spec.train.wire_between, codecs, was_rounded=was_rounded)
    return ClusterPlan(
        workers=tuple(estimate.stage for estimate in estimates),
        predicted_batch_seconds=distance.batch_s,
        estimates=estimates,
        connections=times.connections(),
        distance=distance,
        schedule=costs.spec.train.schedule,
        reductions=times.reductions(),
        tie=times.tie(),
        spares=tuple(sorted({slot.node for slot in slots} - used, key=natural)),
        is_exact=len(classes) == 1 and not rounding,
        exact_reason=_exact_reason(costs.spec.train, order, classes, rounding, num_cuts=len(codecs)),
        arithmetic_classes=classes,
        codecs=tuple(codec.name.lower() for codec in codecs) if any(codecs) else (),
        was_rounded=bool(rounding),
    )


def _estimate(
    costs: StageCosts,
    placed: Sequence[PlacedStage],
    times: PredictedTime,
    depths: Sequence[int],
    hosts: tuple[Mapping[str, int], Mapping[str, int]],
    index: int,
    position: int,
) -> StageEstimate:
    """hosts: the bytes that each machine keeps, and for which it has room."""
    stage, worker = placed[index], placed[index].workers[position]
    slot, number, num_replicas = worker.slot, costs.slices.slice_number(stage.span, stage.recompute), len(stage.workers)
    device_bytes = device_bytes_of(costs, stage, worker, depths[index])
    depth = costs.memory.depth_of(depths[index], costs.memory.num_held(worker.groups))
    num_microbatches = times.num_microbatches(worker.groups)
    is_shared = stage.shares_update
    parts = costs.memory.parts(number, depth, worker.groups, num_replicas, is_shared=is_shared)
    needed_bytes = round(device_bytes * slot.demand)
    return StageEstimate(
        stage=WorkerPart(
            node=slot.node,
            node_incarnation=slot.incarnation,
            device_index=slot.device.index,
            layers=costs.slices.names[stage.span[0] : stage.span[1]],
            depth=depth,
            groups=() if num_replicas == 1 else worker.groups,
            device_bytes=device_bytes,
            recompute=stage.recompute if costs.spec.train.recompute == "auto" else "",
            shares_update=is_shared,
        ),
        stage_index=index,
        device=f"{slot.device.kind}:{slot.device.index}",
        recompute=stage.recompute or costs.spec.train.recompute,
        share=num_microbatches / costs.num_microbatches,
        batch_seconds=times.worker_seconds[index][position],
        device_bytes=needed_bytes,
        device_limit_bytes=slot.limit_bytes,
        device_reserve_bytes=slot.device.reserve_bytes,
        host_bytes=hosts[0].get(slot.machine, 0),
        host_limit_bytes=hosts[1].get(slot.machine, 0),
        demand=slot.demand,
        num_parameters=sum(count * cost.num_parameters for count, cost in costs.slices.in_slice(number)),
        memory=replace(parts, beyond=needed_bytes - sum(astuple(parts))),
        seconds=costs.seconds_parts(slot, number, num_microbatches, num_replicas, is_shared=is_shared),
    )


def _rounding_reason(where: str, codecs: Sequence[Codec], *, was_rounded: bool) -> str:
    """Return why the bits depend on the cuts; empty: they do not."""
    coded = [index for index, codec in enumerate(codecs) if codec]
    if not coded:
        return "wire compression has rounded frames of an earlier plan" if was_rounded else ""
    name, number = codecs[coded[0]].name.lower(), len(coded)
    at = "stages " + " and ".join(f"{index} → {index + 1}" for index in coded) if number < 4 else f"{number} cuts"
    between = " between sites" if where == "sites" else ""
    return f"{name} wire compression rounds the frames of the links{between} ({at}): the bits depend on the cuts"


def _exact_reason(
    train: TrainSpec, order: Sequence[DeviceSlot], classes: tuple[str, ...], rounding: str, *, num_cuts: int
) -> str:
    """Return a sentence; for an inexact job, only the reasons against exactness."""
    of_classes = _reason_of_classes(order, classes)
    if rounding:
        return rounding if len(classes) == 1 else f"{rounding}; and {of_classes}"
    if is_rounding(train):
        why = "no cut lies between sites" if num_cuts else "the plan has one stage, and so no cut"
        return f'{of_classes}, and wire = "{train.wire}" codes no link of this plan: {why}'
    return of_classes


def _reason_of_classes(order: Sequence[DeviceSlot], classes: tuple[str, ...]) -> str:
    if len(classes) == 1:
        return f"all workers have one arithmetic class ({classes[0]})"
    here = sorted({slot.arithmetic_class for slot in order})
    if len(here) > 1:
        examples = (next(slot for slot in order if slot.arithmetic_class == name) for name in here)
        return "the workers are of several arithmetic classes: " + ", ".join(
            f"{_name(slot)} has {slot.arithmetic_class}" for slot in examples
        )
    return f"the job has run on several arithmetic classes: {', '.join(classes)}"


def _name(slot: DeviceSlot) -> str:
    return slot.node if slot.is_only_one else f"{slot.node}:{slot.device.index}"
