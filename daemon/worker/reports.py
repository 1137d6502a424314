"""Makes a worker's messages to its daemon about batches, snapshots, times and failures."""

from collections.abc import Mapping

from headway.daemon.records.shortages import MemoryShortage
from headway.proto import control_pb2
from headway.proto.control_pb2 import Heartbeat, Refused, Report, SnapshotMissed, Wrote
from headway.stages.errors import NonFiniteLossError, UnreachedError
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.telemetry.layer_times import LayerSeconds


def snapshot_written(item: SnapshotEnded) -> Report:
    """Report that all files of a boundary are in place."""
    wrote = Wrote(
        job=item.job, generation=item.generation, boundary=item.boundary, timeline=item.timeline, is_snapshot=True
    )
    for layer, file in item.files.items():
        wrote.files.add(layer=layer, path=str(file.path), size_bytes=file.size_bytes, checksum=file.checksum)
    return Report(wrote=wrote)


def snapshot_missed(item: SnapshotEnded, *, reason: str, factor: int) -> Report:
    """Report a snapshot that was not written, or one so late that only every factor-th is written from now on."""
    missed = SnapshotMissed(
        job=item.job,
        generation=item.generation,
        boundary=item.boundary,
        reason=reason,
        factor=factor,
        written=not item.trouble,
    )
    return Report(snapshot_missed=missed)


def add_layer_times(beat: Heartbeat, layers: Mapping[str, LayerSeconds]) -> None:
    """Add the times of each kind of layer to a heartbeat."""
    for kind, times in layers.items():
        seconds = control_pb2.LayerSeconds(
            forward_s=times.forward_s, backward_s=times.backward_s, update_s=times.update_s, spread=times.spread
        )
        beat.layers[kind].CopyFrom(seconds)


def generation_failed(
    job: str,
    generation: int,
    error: Exception,
    *,
    batch: int,
    fault: str = "",
    lost_peer: int = -1,
    shortage: MemoryShortage | None = None,
) -> Report:
    """Report that a worker cannot continue with a generation. fault: one line that is equal for equal errors.

    lost_peer: the position of the neighbour whose link is lost, if that is the reason. shortage: the refused
    allocation, if the device had no memory left.
    """
    is_hopeless = isinstance(error, NonFiniteLossError)
    refused = Refused(
        job=job,
        generation=generation,
        reason=str(error) if not fault or is_hopeless else f"{type(error).__name__}: {error}",
        fault=fault,
        hopeless=is_hopeless,
        batch=error.batch if isinstance(error, NonFiniteLossError) else batch,
        lost_peer=lost_peer + 1,
        unreached=isinstance(error, UnreachedError),
    )
    if shortage is not None:
        refused.shortage.wanted_bytes = shortage.wanted_bytes
        refused.shortage.allocated_bytes = shortage.allocated_bytes
        refused.shortage.allowed_bytes = shortage.allowed_bytes
        refused.shortage.SetInParent()
    return Report(refused=refused)
