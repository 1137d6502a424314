"""Lists the links of a plan, and chooses the kind of each, with the reason. Pure: both ends get one answer.

A collective link (NCCL between CUDA devices, a plain TCP connection between CPUs) is not encrypted. A gRPC link is, but
copies what CUDA devices exchange through both hosts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, Literal

from headway.daemon.cluster.records import NodeRecord, PlanRecord, WorkerPart, replicas_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.devices import place_names
from headway.daemon.plan.layer_costs import element_bytes, layer_costs, num_hidden, tied_bytes
from headway.daemon.plan.paths import Pair, RelayedWays, pair_of
from headway.stages.links.codec import coded_bytes

WORTH_BEING_PLAIN_BYTES: Final = 1 << 20
"""`auto` takes a plain connection for frames from this size on: `bench/wire.py --both-ways` measures it twice
as fast.
"""

MOST_NAMED: Final = 3
"""Maximum number of links named for one kind and reason; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The properties of the worker at one end that matter."""

    node: str
    site: str
    host: str
    device_kind: str
    site_is_private: bool = False
    """True if the administrator declares that the site's network is private."""
    has_ports: bool = False
    """True if its workers are restricted to some ports: a collective link takes any."""
    shares_its_card: bool = False
    """True if several nodes share the card, so that two ends of a link may be on it."""

    @classmethod
    def of(cls, node: NodeRecord, device_index: int) -> "LinkEnd":
        """Return the end for a node's device; of no kind if the node no longer has the device."""
        device = next((device for device in node.devices if device.index == device_index), None)
        has_ports = bool(node.worker_ports)
        return cls(
            node=node.name,
            site=node.site,
            host=node.host,
            device_kind=device.kind if device is not None else "",
            site_is_private=node.site_is_private,
            has_ports=has_ports,
            shares_its_card=device is not None and device.num_sharers > 1,
        )


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """The kind of a link, and the reason in a sentence."""

    is_collective: bool
    reason: str


def choose_link(
    wanted: Literal["auto", "grpc", "collective"], one: LinkEnd, other: LinkEnd, *, frame_bytes: int
) -> LinkChoice:
    """Choose the kind of link. wanted: the job's setting. frame_bytes: the largest frame that the two exchange."""
    if wanted == "grpc":
        return LinkChoice(False, "the job asks for gRPC links")
    if one.site != other.site:
        return LinkChoice(False, f"sites {one.site} and {other.site}: between sites everything is encrypted")
    if one.device_kind != other.device_kind:
        return LinkChoice(
            False, f"{one.device_kind} and {other.device_kind}: a collective link is between devices of one kind"
        )
    if one.host != other.host and (refusal := _not_between_hosts(one, other)):
        return LinkChoice(False, refusal)
    if one.host == other.host and one.shares_its_card and other.shares_its_card:
        return LinkChoice(False, "several nodes share a card, and NCCL gives a card to one process")
    if wanted == "collective":
        return LinkChoice(True, f"the job asks for collective links, and both are in site {one.site}")
    if one.device_kind != "cpu":
        where = "of one machine" if one.host == other.host else f"of the private site {one.site}"
        return LinkChoice(True, f"devices {where}: NCCL carries frames between them without a copy through the hosts")
    if frame_bytes < WORTH_BEING_PLAIN_BYTES:
        return LinkChoice(False, f"frames of {frame_bytes / 2**10:.3g} KiB: gRPC carries them as fast, and encrypts")
    size = f"frames of {frame_bytes / 2**20:.3g} MiB"
    return LinkChoice(True, f"{size} inside site {one.site}: a connection without TLS carries them faster")


def _not_between_hosts(one: LinkEnd, other: LinkEnd) -> str:
    """Return why two machines of a site have no collective link; empty: they may."""
    open_end = next((end for end in (one, other) if not end.site_is_private), None)
    if open_end is not None:
        return f"node {open_end.node} has no site_is_private: plain links between machines need a private site"
    keeper = next((end for end in (one, other) if end.has_ports), None)
    return f"node {keeper.node} has named ports, and a collective link takes any port" if keeper is not None else ""


def largest_frame_bytes(spec: JobSpec, plan: PlanRecord, one: int, other: int) -> int:
    """Return the largest frame that two workers of a plan exchange, by position; both ends get one answer.

    These are hidden states, or, between replicas, the sums of their groups for a slice of the gradient. The ends of a
    tied embedding exchange the gradient of the whole matrix.
    """
    stage, beside = plan.stage_index(one), plan.stage_index(other)
    if stage != beside:
        return _between_stages(spec, plan, min(stage, beside), max(stage, beside))
    num_groups = max(len(plan.workers[position].groups) for position in (one, other))
    return num_groups * _sums_bytes(spec, plan.workers[one].layers) // len(plan.replicas[stage])


def _between_stages(spec: JobSpec, plan: PlanRecord, upper: int, lower: int) -> int:
    """Return the largest frame between workers of two stages."""
    hidden = _frame_bytes(spec, plan, lower) if lower == upper + 1 else 0
    are_tied = spec.model.trains_tie and upper == 0 and lower == plan.num_stages - 1
    return max(hidden, tied_bytes(spec) if are_tied else 0)


def _frame_bytes(spec: JobSpec, plan: PlanRecord, stage: int) -> int:
    """Return the coded bytes of a microbatch's hidden states on their way to a stage."""
    return coded_bytes(plan.codec(stage), num_hidden(spec), element_bytes(spec.train))


def _sums_bytes(spec: JobSpec, layers: Iterable[str]) -> int:
    """Return the bytes of one group's sums."""
    held = frozenset(layers)
    return sum(cost.group_bytes for cost in layer_costs(spec) if cost.name in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLink:
    """One link of a plan, for people: between workers of neighbouring stages or of a tied embedding's ends, or
    between replicas.
    """

    upper: str
    """Node of the worker that comes first in the plan; `node:device` if a node has several."""
    lower: str
    kind: Literal["grpc", "collective"]
    reason: str
    via: str = ""
    """Relay through which it leads; empty: one node dials the other."""


def planned_links(spec: JobSpec, plan: PlanRecord, nodes: Mapping[str, NodeRecord]) -> tuple[PlannedLink, ...]:
    """Return every link of a plan, with its kind and reason, except links of absent nodes."""
    names = place_names([(worker.node, worker.device_index) for worker in plan.workers])
    ends = [
        LinkEnd.of(nodes[worker.node], worker.device_index) if worker.node in nodes else None for worker in plan.workers
    ]
    relayed = RelayedWays.of(nodes.values(), nodes.values())
    found = []
    for one, other, frame_bytes in _linked(spec, plan):
        upper, lower = ends[one], ends[other]
        if upper is not None and lower is not None:
            choice = choose_link(spec.train.link, upper, lower, frame_bytes=frame_bytes)
            kind: Literal["grpc", "collective"] = "collective" if choice.is_collective else "grpc"
            # A collective link meets at the dialled worker, and then connects by itself.
            via = "" if choice.is_collective else relayed.via(upper.node, lower.node)
            reason = _with_way(choice, upper, lower, via)
            found.append(PlannedLink(upper=names[one], lower=names[other], kind=kind, reason=reason, via=via))
    return tuple(found)


def _with_way(choice: LinkChoice, one: LinkEnd, other: LinkEnd, via: str) -> str:
    """Return the reason of a link, and the relay or unix socket if it uses one. A worker without a unix socket is
    dialled over TCP.
    """
    if via:
        return f"{choice.reason}; through the relay {via}"
    is_local = one.node == other.node and (not choice.is_collective or one.device_kind == "cpu")
    return f"{choice.reason}; inside a node over a unix socket" if is_local else choice.reason


def link_sentences(links: Iterable[PlannedLink]) -> tuple[str, ...]:
    """Return one sentence for each kind and reason: `Links by gRPC (a → b, b → c): frames of 512 KiB: …`."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for link in links:
        pairs.setdefault((link.kind, link.reason), []).append(f"{link.upper} → {link.lower}")
    sentences = []
    for (kind, reason), found in pairs.items():
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        by = "plain connection" if kind == "collective" else "gRPC"
        sentences.append(f"Link{'s' * (len(found) > 1)} by {by} ({', '.join(found[:MOST_NAMED])}{more}): {reason}.")
    return tuple(sentences)


def _linked(spec: JobSpec, plan: PlanRecord) -> Iterator[tuple[int, int, int]]:
    """Yield the positions of workers that share microbatches, and of replicas, with each pair's
    `largest_frame_bytes`.
    """
    stages, replicas = plan.workers, plan.replicas
    joined = list(pairwise(range(len(replicas))))
    if spec.model.trains_tie and len(replicas) > 2:
        joined.append((0, len(replicas) - 1))
    for above_index, below_index in joined:
        above, below = replicas[above_index], replicas[below_index]
        hidden = _between_stages(spec, plan, above_index, below_index)
        for upper in above:
            held = frozenset(stages[upper].groups)
            for lower in below:
                if not held or not stages[lower].groups or not held.isdisjoint(stages[lower].groups):
                    yield upper, lower, hidden
    for workers in replicas:
        sums = _sums_bytes(spec, stages[workers[0]].layers) if len(workers) > 1 else 0
        for one, other in combinations(workers, 2):
            num_groups = max(len(stages[one].groups), len(stages[other].groups))
            yield one, other, num_groups * sums // len(workers)


@dataclass(frozen=True, slots=True)
class Linked:
    """The positions of all workers that have a link with a worker."""

    upstream: tuple[int, ...]
    """Of the stage before, those that share a reduction group."""
    downstream: tuple[int, ...]
    """Of the stage after, likewise."""
    siblings: tuple[int, ...]
    """All other replicas of its stage."""
    tied: tuple[int, ...]
    """At the other end of a tied embedding, those that share a group; empty if the ends are neighbours or one stage."""


def linked(stages: Sequence[WorkerPart], position: int, *, trains_tie: bool) -> Linked:
    """Return the links of a worker. trains_tie: whether the first and the last stage train one matrix."""
    return _links_of(stages, replicas_of(stages), position, trains_tie=trains_tie)


def _links_of(
    stages: Sequence[WorkerPart], replicas: Sequence[Sequence[int]], position: int, *, trains_tie: bool
) -> Linked:
    stage = next(index for index, workers in enumerate(replicas) if position in workers)

    def of_stage(index: int) -> tuple[int, ...]:
        workers = replicas[index] if 0 <= index < len(replicas) else ()
        return tuple(other for other in workers if _share_a_group(stages[position], stages[other]))

    siblings = tuple(other for other in replicas[stage] if other != position)
    last = len(replicas) - 1
    has_far_end = trains_tie and last > 1 and stage in (0, last)
    tied = of_stage(last - stage) if has_far_end else ()
    return Linked(of_stage(stage - 1), of_stage(stage + 1), siblings, tied)


def neighbours(stages: Sequence[WorkerPart], position: int, *, trains_tie: bool) -> tuple[int, ...]:
    """Return all workers that have a link with a worker, by position."""
    return _neighbours(linked(stages, position, trains_tie=trains_tie))


def _neighbours(found: Linked) -> tuple[int, ...]:
    return tuple(sorted({*found.upstream, *found.downstream, *found.siblings, *found.tied}))


def linked_nodes(stages: Sequence[WorkerPart], *, trains_tie: bool) -> Iterator[tuple[str, str]]:
    """Yield the nodes of each link of a plan, the one that dials first."""
    replicas = replicas_of(stages)
    for position in range(len(stages)):
        for other in _neighbours(_links_of(stages, replicas, position, trains_tie=trains_tie)):
            if position < other:
                yield stages[position].node, stages[other].node


def linked_pairs(stages: Sequence[WorkerPart], *, trains_tie: bool) -> frozenset[Pair]:
    """Return the pairs of nodes between which a plan has links."""
    return frozenset(pair_of(*nodes) for nodes in linked_nodes(stages, trains_tie=trains_tie))


def _share_a_group(one: WorkerPart, other: WorkerPart) -> bool:
    return not one.groups or not other.groups or not set(one.groups).isdisjoint(other.groups)
