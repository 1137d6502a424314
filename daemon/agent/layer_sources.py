"""Finds the source of each part of a worker's state at its start, or the step that fetches it. Pure."""

from dataclasses import replace
from typing import Final

from headway.daemon.agent.local_state import Assignment, NodeState
from headway.daemon.agent.steps import Fetch, GiveUp
from headway.daemon.jobs.job import OriginSpec
from headway.daemon.records.records import CheckpointRecord
from headway.daemon.situation.deadlines import LEASE_TTL_S
from headway.daemon.storage.state_key import BASE_PREFIX, CARRIED_PART, JOURNAL, ORIGIN_PLACE, StateKey
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.goal import Source, SourceKind

HEARD_AFTER_S: Final = 2 * LEASE_TTL_S
"""Time of uninterrupted contact with etcd after which every living node has registered again, with its files."""


def source_of(view: ClusterView, assignment: Assignment, part: str, node: NodeState) -> Source | Fetch | GiveUp | None:
    """Return the source of a part, or the step that fetches it, or None while neither is known."""
    plan, worker = assignment.plan, assignment.worker
    if plan.source == "initial" and _has_adapter(assignment):
        return Source(part, SourceKind.INITIAL)
    if plan.source == "initial":
        return _initial_source(assignment, part, node)
    if _is_live(assignment, part):
        return Source(part, SourceKind.LIVE)
    key = StateKey(assignment.job.name, plan.source_timeline, plan.boundary, part)
    if key in node.held:
        return Source(part, SourceKind.FILE, str(node.held[key].path))
    checkpoint = assignment.job.checkpoint if plan.source == "checkpoint" else None
    if checkpoint is not None and not _has(checkpoint, key):
        return GiveUp(worker.device_index, assignment.run_key, f"the checkpoint {checkpoint.url} has no {key}")
    told = {
        name: file
        for name, file in assignment.job.holders(key.timeline, key.boundary, key.layer).items()
        if name != node.name
    }
    living = {name: file for name, file in told.items() if _is_living(view, assignment.job, key, name)}
    if checkpoint is not None:
        expected = checkpoint.files[part]
        living = {name: file for name, file in living.items() if file.checksum == expected.checksum}
        if not living:
            return Fetch(worker.device_index, assignment.run_key, key, (), checkpoint.url, expected)
    if living:
        file = living[min(living)]
        same = tuple(sorted(name for name in living if living[name].checksum == file.checksum))
        expected = file.digest
        return Fetch(worker.device_index, assignment.run_key, key, same, "", expected)
    if told or not has_heard_all(view, node.now):
        return None  # its holders are away: either they come back, or their records expire
    return GiveUp(worker.device_index, assignment.run_key, f"no node holds {key}")


def carried_source(assignment: Assignment, node: NodeState) -> Source | Fetch | None:
    """Return the source of the files that an export carries over; None: the plan does not begin with a model's folder.

    The node of the first worker keeps them, so that an export has them when the folder is gone.
    """
    spec = assignment.job.spec
    if assignment.plan.source != "initial" or spec is None or not spec.origin.url:
        return None
    return _initial_source(assignment, CARRIED_PART, node)


def base_source(assignment: Assignment, layer: str, node: NodeState) -> Source | Fetch | None:
    """Return the source of the frozen weights beside a layer's adapters: its part of the model's folder.

    None: the layer has none, or they are a function of the seed.
    """
    spec = assignment.job.spec
    if spec is None or not _has_adapter(assignment) or spec.origin.digest_of(layer) is None:
        return None
    found = _initial_source(assignment, layer, node)
    return replace(found, layer=f"{BASE_PREFIX}{layer}") if isinstance(found, Source) else found


def frozen_fetches(assignment: Assignment, node: NodeState) -> list[Fetch]:
    """Return the fetches of frozen weights for layers that come to a worker with a plan in preparation."""
    worker = assignment.worker
    if assignment.run_key in worker.failures:
        return []
    there = worker.actual.layers if worker.actual.job == assignment.job.name else ()
    found = (base_source(assignment, layer, node) for layer in assignment.stage.layers if layer not in there)
    return [each for each in found if isinstance(each, Fetch)]


def _has_adapter(assignment: Assignment) -> bool:
    return assignment.job.spec is not None and assignment.job.spec.model.has_adapter


def _initial_source(assignment: Assignment, part: str, node: NodeState) -> Source | Fetch:
    """Return the source of boundary 0: a function of the seed, or a part of the folder with the initial weights."""
    origin = assignment.job.spec.origin if assignment.job.spec is not None else OriginSpec()
    expected = origin.digest_of(part)
    if expected is None:  # the journal, or a layer of a job without such a folder
        return Source(part, SourceKind.INITIAL)
    key = StateKey(assignment.job.name, *ORIGIN_PLACE, part)
    if key in node.held:
        return Source(part, SourceKind.FILE, str(node.held[key].path))
    return Fetch(assignment.worker.device_index, assignment.run_key, key, (), origin.url, expected)


def has_heard_all(view: ClusterView, now: float) -> bool:
    """Return whether missing records prove absence: etcd may have been unreachable for longer than a lease."""
    return view.steady_since is not None and now >= view.steady_since + HEARD_AFTER_S


def _has(checkpoint: CheckpointRecord, key: StateKey) -> bool:
    is_there = (checkpoint.timeline, checkpoint.boundary) == (key.timeline, key.boundary)
    return is_there and key.layer in checkpoint.files


def _is_living(view: ClusterView, job: JobView, key: StateKey, name: str) -> bool:
    """Return whether the node that reported a file is up, in the incarnation that reported it."""
    node = view.nodes.get(name)
    return node is not None and node.incarnation == job.state[key.timeline, key.boundary][name].incarnation


def _is_live(assignment: Assignment, part: str) -> bool:
    """Return whether the worker still has the part in its buffers, at the plan's boundary, from the previous
    generation.
    """
    actual, plan = assignment.worker.actual, assignment.plan
    is_planned = plan.source == "nodes" and plan.source_timeline == plan.timeline
    is_there = actual.job == assignment.job.name and actual.boundary == plan.boundary
    return is_planned and is_there and (actual.has_journal if part == JOURNAL else part in actual.layers)
