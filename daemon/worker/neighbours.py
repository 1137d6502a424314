"""A worker among the others of its plan: the context of its stage, and its links for one generation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch

from headway.daemon.cluster.measurements import LayerTime, LinkCuts
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker.goal import Goal, Neighbour, Start, loading_s
from headway.daemon.worker.liveness import FIRST_OPERATION_BATCHES, LAUNCHED_FACTOR, launched_s
from headway.optim.routing import Group, route_layer
from headway.optim.update_shares import matrix_owners
from headway.stages.device.device import StageDevice
from headway.stages.device.run_events import DeviceDone
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.attachment import KeptPairs
from headway.stages.links.codec import Codec
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.nccl import NcclAttach
from headway.stages.links.receive_buffers import bytes_for
from headway.stages.links.stream_link import StreamLink
from headway.stages.links.worker_link import WorkerLink
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import RECOMPUTES
from headway.stages.stage.context import PATIENCE_S, StageContext, StageLinks
from headway.stages.stage.launched_ops import MOST_AHEAD
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.update_shares import UpdateShares

WorkerItem = Goal | Frame | LinkLost | DeviceDone | SnapshotEnded | BaseException
"""An item from the daemon, the links, the device or the snapshot writer; an exception is another thread's failure."""

WorkerInbox = SimpleQueue[WorkerItem]
"""The one queue of everything that reaches a worker's main thread. `StageWorker` takes each item, in or between runs.
"""

FIRST_ANSWER = timedelta(seconds=20)
"""Maximum silence of a dialled neighbour before the link first opens. A neighbour that loads its layers answers that it
is not ready, and its daemon notices sooner when its process stands still. The job's `link_timeout_s` applies only to a
link that was open.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The neighbours by what they are, and what goes over the link to each position."""

    upstream: Mapping[int, Neighbour]
    """By reduction group, as `downstream` and `tied`."""
    downstream: Mapping[int, Neighbour]
    siblings: Mapping[int, Neighbour]
    """By the index of their groups, which is equal on every replica."""
    tied: Mapping[int, Neighbour]
    has_tied_neighbour: bool
    """True if the ends of a tied embedding are neighbours: their link carries that too."""
    contracts: Mapping[int, FrameContract]
    codecs: Mapping[int, Codec]


def _around(start: Start, spec: JobSpec, context: StageContext) -> _Around:
    own_groups = groups_of(start.plan, start.position, spec)
    upstream = by_group(start.neighbours.upstream, start, spec)
    downstream = by_group(start.neighbours.downstream, start, spec)
    replicas = start.plan.replicas[context.stage_index]
    siblings = {replicas.index(peer.position): peer for peer in start.neighbours.siblings}
    contracts = {
        peer.position: FrameContract.between_replicas(
            spec.model,
            spec.train,
            layers=context.layers,
            replica_groups=context.replica_groups,
            own=context.replica_index,
            sibling=k,
            update_shares=context.update_shares,
        )
        for k, peer in siblings.items()
    }
    has_tied_neighbour = context.has_tied_end and context.num_stages == 2
    tied: Mapping[int, Neighbour] = {}
    if context.has_tied_end:
        tied = upstream or downstream
        if not has_tied_neighbour:
            tied = by_group(start.neighbours.tied, start, spec)
            contracts |= {peer.position: FrameContract.between_ends(spec.model, spec.train) for peer in tied.values()}
    codecs = {}
    for neighbours, codec, cut in (
        (upstream, context.upstream_codec, context.cut_above),
        (downstream, context.downstream_codec, context.cut_below),
    ):
        for peer in neighbours.values():
            codecs[peer.position] = codec
            contracts[peer.position] = FrameContract.of(
                spec.model,
                spec.train,
                has_norms=context.is_lead and neighbours[own_groups[0]] is peer,
                has_ties=has_tied_neighbour,
                activations=codec,
                gradients=codec,
                cut=cut,
            )
    return _Around(
        upstream=upstream,
        downstream=downstream,
        siblings=siblings,
        tied=tied,
        has_tied_neighbour=has_tied_neighbour,
        contracts=contracts,
        codecs=codecs,
    )


class Neighbours:
    """Opens and closes the links of a generation, and removes their last frames from the inbox."""

    def __init__(
        self,
        endpoint: LinkEndpoint,
        inbox: WorkerInbox,
        on_stuck: Callable[[str], None],
        timed: Callable[[], Mapping[str, LayerTime]] = dict,
    ) -> None:
        """on_stuck: is called with the name of a peer whose attachment does not end. timed: the present run's layers,
        those that are timed.
        """
        self._endpoint = endpoint
        self._inbox = inbox
        self._on_stuck = on_stuck
        self._timed = timed
        self._kept = KeptPairs()
        self._links: list[StreamLink] = []
        self._own = 0
        """This worker's position in the plan."""
        self._positions: dict[str, int] = {}
        """Peer name of each link to the peer's position in the plan."""

    def open(self, start: Start, spec: JobSpec, context: StageContext, device: StageDevice) -> StageLinks:
        """Open the links of this generation. The previous generation's links are closed first.

        There is one link to each neighbour for all groups.
        """
        self.close()
        around = _around(start, spec, context)
        upstream, downstream, siblings, tied = around.upstream, around.downstream, around.siblings, around.tied
        contracts, codecs = around.contracts, around.codecs
        below = {k: peer for k, peer in siblings.items() if k < context.replica_index}
        above = {k: peer for k, peer in siblings.items() if k > context.replica_index}

        # Both ends follow one rule, so exactly one of them dials: the earlier stage, or the replica with the lower
        # index.
        far_end = () if around.has_tied_neighbour else tied.values()
        accepted = _distinct([*upstream.values(), *below.values(), *(() if context.is_first else far_end)])
        dialled = _distinct([*downstream.values(), *above.values(), *(far_end if context.is_first else ())])
        self._kept.want_only(peer.incarnation for peer in (*accepted, *dialled) if peer.is_collective)
        links: dict[int, StreamLink] = {}
        for number, peer in enumerate(accepted, 1):
            # Until the last accept of a generation, the endpoint asks unexpected callers to come again.
            terms = self._terms(start, spec, peer, contracts[peer.position], context, _until_dialled(spec), device)
            links[peer.position] = self._endpoint.accept(terms, is_last=number == len(accepted))
        for peer in dialled:
            terms = self._terms(start, spec, peer, contracts[peer.position], context, FIRST_ANSWER, device)
            links[peer.position] = self._endpoint.dial(terms)
        self._own = start.position
        self._positions = {link.peer: worker for worker, link in links.items()}
        # last: other threads call `broken`, which looks up the positions of the links it finds
        self._links += links.values()
        coded = {
            peer.position: WorkerLink(
                links[peer.position],
                device,
                codecs.get(peer.position, Codec.NONE),
                spec.train,
                to_device=peer.is_collective,
            )
            for peer in (*accepted, *dialled)
        }
        return StageLinks(
            upstream={group: coded[peer.position] for group, peer in upstream.items()},
            downstream={group: coded[peer.position] for group, peer in downstream.items()},
            siblings={k: coded[peer.position] for k, peer in siblings.items()},
            tied={group: coded[peer.position] for group, peer in tied.items()},
        )

    def position_of(self, peer: str) -> int:
        """Return a neighbour's position in the plan by its name; -1: no link has this name."""
        return self._positions.get(peer, -1)

    @property
    def broken(self) -> list[int]:
        """Return the positions of the neighbours whose link is broken now. Any thread may call it."""
        broken = (
            self.position_of(link.peer)
            for link in tuple(self._links)
            if link.broken_at is not None and not link.is_over
        )
        return [position for position in broken if position >= 0]

    @property
    def cuts(self) -> tuple[LinkCuts, ...]:
        """Return what befell the links that have been cut. Any thread may call it."""
        counted = [(self.position_of(link.peer), link.num_resumed, link.cut_s) for link in tuple(self._links)]
        broken, found = self.broken, []  # after the counts: one that goes on in between must not stay cut
        for peer, num_back, cut_s in counted:
            if peer >= 0 and (num_back or peer in broken):
                ends = (min(self._own, peer), max(self._own, peer))
                num_cut = num_back + (peer in broken)
                found.append(LinkCuts(ends=ends, num_cut=num_cut, num_back=num_back, cut_s=round(cut_s, 2)))
        return tuple(found)

    def forget_pairs(self) -> None:
        """Free the cards of what links have left for later ones."""
        self._kept.want_only(())

    def close(self) -> None:
        """Close the links. A closed link delivers nothing; frames already in the inbox are dropped."""
        for link in self._links:
            link.close()
        self._links.clear()
        arrived = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        for item in arrived:
            if not isinstance(item, Frame | LinkLost):
                self._inbox.put(item)

    def _terms(
        self,
        start: Start,
        spec: JobSpec,
        peer: Neighbour,
        contract: FrameContract,
        context: StageContext,
        first_contact: timedelta,
        device: StageDevice,
    ) -> LinkTerms:
        is_on_cards = peer.is_collective and context.device.type == "cuda"
        return LinkTerms(
            job=spec.job.name,
            generation=context.generation,
            stage=context.stage_index,
            worker=start.position,
            peer_stage=StageIndex(start.plan.stage_index(peer.position)),
            peer_worker=peer.position,
            peer_incarnation=peer.incarnation,
            peer_node=start.plan.workers[peer.position].node,
            peer_name=name_of(start.plan, peer.position),
            peer_address=peer.address,
            inbox=self._inbox,
            contract=contract,
            attach=NcclAttach(context.device, self._on_stuck, self._kept) if is_on_cards else None,
            launched_s=partial(self._launched_s, start, spec),
            is_plain=peer.is_collective and not is_on_cards,
            empty_bytes=bytes_for(device),
            first_contact=first_contact,
            silence=timedelta(seconds=spec.fault.link_timeout_s),
        )

    def _launched_s(self, start: Start, spec: JobSpec) -> float:
        """Return for how long this worker's card may have work before it; a batch, until its layers are timed."""
        known_s = launched_s(start, spec.train, self._timed(), num_ahead=MOST_AHEAD)
        return LAUNCHED_FACTOR * (known_s or start.plan.predicted_batch_seconds)


def _until_dialled(spec: JobSpec) -> timedelta:
    """Return how long a neighbour may take to dial, because it loads its layers first."""
    return timedelta(seconds=loading_s(spec, spec.layers) + spec.fault.link_timeout_s) + FIRST_ANSWER


def _distinct(peers: Iterable[Neighbour]) -> list[Neighbour]:
    """Return each worker once."""
    return list({peer.position: peer for peer in peers}.values())


def start_context(start: Start, spec: JobSpec, device: torch.device) -> StageContext:
    """Return the context of the run that begins."""
    plan, part = start.plan, start.plan.workers[start.position]
    stage = plan.stage_index(start.position)
    siblings = plan.replicas[stage]
    replicas = tuple(plan.workers[k].groups for k in siblings) if len(siblings) > 1 else ()
    return StageContext(
        model=spec.model,
        train=for_part(spec, plan, start.position).train,
        seed=spec.job.seed,
        job=spec.job.name,
        generation=Generation(plan.generation),
        timeline=Timeline(plan.timeline),
        stage_index=StageIndex(stage),
        num_stages=plan.num_stages,
        layers=tuple(LayerName(layer) for layer in part.layers),
        depth=part.depth,
        boundary=Boundary(plan.boundary),
        device=device,
        replica_groups=replicas,
        replica_index=siblings.index(start.position) if replicas else 0,
        update_shares=update_shares(spec, part.layers, len(replicas)) if part.shares_update else None,
        group_by_group=all(len(workers) == 1 for workers in plan.replicas),
        upstream_codec=plan.codec(stage),
        downstream_codec=plan.codec(stage + 1),
        patience_s=PATIENCE_S + FIRST_OPERATION_BATCHES * plan.predicted_batch_seconds,
        stops_at_non_finite=spec.fault.non_finite == "stop",
    )


def for_part(spec: JobSpec, plan: PlanRecord, position: int) -> JobSpec:
    """Return the job with what its plan has chosen for a worker."""
    chosen = plan.workers[position].recompute or spec.train.recompute
    recompute = next((each for each in RECOMPUTES if each == chosen), spec.train.recomputes[0])
    return replace(spec, train=replace(spec.train, recompute=recompute))


def groups_of(plan: PlanRecord, position: int, spec: JobSpec) -> tuple[int, ...]:
    """Return the reduction groups that a worker holds."""
    return plan.workers[position].groups or tuple(range(spec.train.reduction_groups))


def by_group(peers: Iterable[Neighbour], start: Start, spec: JobSpec) -> dict[int, Neighbour]:
    """Return, for each of the worker's groups, the neighbour that holds it."""
    own = groups_of(start.plan, start.position, spec)
    return {group: peer for peer in peers for group in groups_of(start.plan, peer.position, spec) if group in own}


def name_of(plan: PlanRecord, position: int) -> str:
    """Return a readable name: the stage, and the position in the plan if the stage has several workers."""
    stage = f"stage {plan.stage_index(position)}"
    return f"{stage} worker {position}" if plan.workers[position].groups else stage


def update_shares(spec: JobSpec, layers: Sequence[str], num_replicas: int) -> UpdateShares | None:
    """Return the owners of a stage's matrices; None if there is nothing to share: one worker, or no matrix for Muon."""
    shapes = orthogonalized_shapes(spec, layers)
    if num_replicas < 2 or not shapes:
        return None
    owners = matrix_owners(shapes, num_replicas)
    num_elements = [0] * num_replicas
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        num_elements[owner] += rows * columns
    return UpdateShares(owners, tuple(num_elements), getattr(torch, spec.optim.matrices.newton_schulz_dtype))


def orthogonalized_shapes(spec: JobSpec, layers: Sequence[str]) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that Muon steps, in the order of the stage's optimizers."""
    if not spec.optim.matrices.kind.is_muon:
        return []
    shapes: list[tuple[int, int]] = []
    for layer in layers:
        parameters = {
            name: torch.empty(shape, device="meta") for name, shape in trained_shapes(layer, spec.model).items()
        }
        names = route_layer(layer, parameters).get(Group.MATRICES, ())
        shapes += [(parameters[name].size(0), parameters[name].size(1)) for name in names]
    return shapes
