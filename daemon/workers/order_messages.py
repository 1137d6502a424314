"""Turns steps into messages for a worker."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.jobs.job import JobSpec, preparation_s
from headway.daemon.records.format import encode
from headway.daemon.records.records import PlanRecord
from headway.daemon.storage.pace import transfer_s
from headway.daemon.storage.state_store import StateStore
from headway.daemon.workers.liveness import FIRST_OPERATION_BATCHES, LOADING_S
from headway.daemon.workers.orders import (
    Neighbour,
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderSpaceSnapshots,
    OrderStart,
    OrderStopAt,
    OrderTrimJournal,
    OrderWrite,
    Source,
    SourceKind,
)
from headway.daemon.workers.status import JobGeneration, OrderKind
from headway.proto import control_pb2
from headway.stages.stage.context import PATIENCE_S

OrderStep = (
    OrderPrepare
    | OrderStart
    | OrderChooseStop
    | OrderStopAt
    | OrderWrite
    | OrderSpaceSnapshots
    | OrderTrimJournal
    | OrderRelease
)


@dataclass(frozen=True, slots=True)
class AddressedOrder:
    """A message for a worker, and the run to which its answer belongs."""

    kind: OrderKind
    run_key: JobGeneration
    message: control_pb2.Order
    within_s: float | None = None
    """Time for the answer, instead of the time of its kind."""
    batch_s: float = 0.0
    """Predicted seconds of a batch, for a Start."""


def order_message(
    step: OrderStep,
    spec_of: Callable[[str], JobSpec],
    store: StateStore,
    log_path: Callable[[str], Path],
    *,
    data_state: Callable[[str], str] = lambda _: "",
) -> AddressedOrder:
    """Return the order of a step. spec_of and log_path are called for the step's job, data_state for its data."""
    match step:
        case OrderPrepare():
            spec = spec_of(step.run_key.job)
            prepare = control_pb2.Prepare(
                job=encode(spec),
                job_name=step.run_key.job,
                generation=step.run_key.generation,
                stage=_assignment(step.plan, step.position, spec),
                data_paths=step.data_paths,
                data_states=[data_state(path) for path in step.data_paths],
                log_path=str(log_path(step.run_key.job)),
                device_index=step.device_index,
            )
            order = control_pb2.Order(prepare=prepare)
            return AddressedOrder(OrderKind.PREPARE, step.run_key, order, within_s=preparation_s(spec.train))
        case OrderStart():
            snapshot_dir = store.timeline_directory_of(step.run_key.job, step.plan.timeline)
            start = control_pb2.Start(
                job_name=step.run_key.job,
                generation=step.run_key.generation,
                timeline=step.plan.timeline,
                boundary=step.plan.boundary,
                stage=_assignment(step.plan, step.position, spec_of(step.run_key.job)),
                sources=[_source(source) for source in step.sources],
                upstream=_peers(step.plan, step.neighbours.upstream),
                downstream=_peers(step.plan, step.neighbours.downstream),
                siblings=_peers(step.plan, step.neighbours.siblings),
                tied=_peers(step.plan, step.neighbours.tied),
                # Files of boundary 0 are parts of a model's folder, which belong to no timeline.
                source_timeline=0 if step.plan.source == "initial" else step.plan.source_timeline,
                snapshot_dir=str(snapshot_dir) if step.takes_snapshots else "",
                snapshot_live=step.takes_snapshots and any(source.kind is SourceKind.LIVE for source in step.sources),
                furthest=step.plan.furthest,
                source_job=step.source_job,
                patience_s=PATIENCE_S + FIRST_OPERATION_BATCHES * step.plan.predicted_batch_seconds,
                neighbours_load_s=loading_s(spec_of(step.run_key.job), spec_of(step.run_key.job).layers),
            )
            layers = step.plan.workers[step.position].layers
            return AddressedOrder(
                OrderKind.START,
                step.run_key,
                control_pb2.Order(start=start),
                within_s=loading_s(spec_of(step.run_key.job), layers),
                batch_s=step.plan.predicted_batch_seconds,
            )
        case OrderChooseStop():
            choose = control_pb2.ChooseStop(job_name=step.run_key.job, generation=step.run_key.generation)
            return AddressedOrder(OrderKind.CHOOSE_STOP, step.run_key, control_pb2.Order(choose_stop=choose))
        case OrderStopAt():
            stop = control_pb2.StopAt(
                job_name=step.run_key.job, generation=step.run_key.generation, boundary=step.boundary
            )
            return AddressedOrder(OrderKind.STOP_AT, step.run_key, control_pb2.Order(stop_at=stop))
        case OrderWrite():
            write = control_pb2.Write(
                job_name=step.run_key.job,
                generation=step.run_key.generation,
                timeline=step.timeline,
                boundary=step.boundary,
                layers=step.layers,
                directory=str(store.timeline_directory_of(step.run_key.job, step.timeline) / str(step.boundary)),
            )
            within_s = loading_s(spec_of(step.run_key.job), step.layers)
            return AddressedOrder(OrderKind.WRITE, step.run_key, control_pb2.Order(write=write), within_s=within_s)
        case OrderSpaceSnapshots():
            space = control_pb2.SpaceSnapshots(
                job_name=step.run_key.job, generation=step.run_key.generation, factor=step.factor
            )
            return AddressedOrder(OrderKind.SPACE_SNAPSHOTS, step.run_key, control_pb2.Order(space_snapshots=space))
        case OrderTrimJournal():
            trim = control_pb2.TrimJournal(
                job_name=step.run_key.job, generation=step.run_key.generation, boundary=step.boundary
            )
            return AddressedOrder(OrderKind.TRIM_JOURNAL, step.run_key, control_pb2.Order(trim_journal=trim))
        case OrderRelease():
            release = control_pb2.Release(job_name=step.job)
            return AddressedOrder(OrderKind.RELEASE, JobGeneration(step.job, 0), control_pb2.Order(release=release))


def loading_s(spec: JobSpec, layers: Collection[str]) -> float:
    """Return the time for a worker to load or write the state of some layers, at the minimum rate."""
    return LOADING_S + transfer_s(sum(cost.loaded_bytes for cost in layer_costs(spec) if cost.name in layers))


def _assignment(plan: PlanRecord, position: int, spec: JobSpec) -> control_pb2.StageAssignment:
    worker = plan.workers[position]
    return control_pb2.StageAssignment(
        index=plan.stage_index(position),
        num_stages=plan.num_stages,
        layers=worker.layers,
        depth=worker.depth,
        groups=worker.groups,
        group_by_group=all(len(workers) == 1 for workers in plan.replicas),
        worker=position,
        upstream_codec=plan.codec(plan.stage_index(position)),
        downstream_codec=plan.codec(plan.stage_index(position) + 1),
        recompute=worker.recompute or spec.train.recompute,
        shares_update=worker.shares_update,
    )


def _source(source: Source) -> control_pb2.LayerSource:
    match source.kind:
        case SourceKind.LIVE:
            return control_pb2.LayerSource(layer=source.layer, live=True)
        case SourceKind.INITIAL:
            return control_pb2.LayerSource(layer=source.layer, initial=True)
        case SourceKind.FILE:
            return control_pb2.LayerSource(layer=source.layer, path=source.path)


def _peers(plan: PlanRecord, neighbours: Iterable[Neighbour]) -> list[control_pb2.Peer]:
    return [
        control_pb2.Peer(
            stage=plan.stage_index(neighbour.position),
            address=neighbour.address,
            incarnation=neighbour.incarnation,
            worker=neighbour.position,
            groups=plan.workers[neighbour.position].groups,
            collective=neighbour.is_collective,
            node=plan.workers[neighbour.position].node,
        )
        for neighbour in neighbours
    ]
