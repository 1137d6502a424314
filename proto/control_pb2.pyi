from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InviteRequest(_message.Message):
    __slots__ = ("name", "role", "hosts", "etcd", "lasts_s", "valid_s", "again")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    ETCD_FIELD_NUMBER: _ClassVar[int]
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    hosts: _containers.RepeatedScalarFieldContainer[str]
    etcd: _containers.RepeatedScalarFieldContainer[str]
    lasts_s: float
    valid_s: float
    again: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., hosts: _Optional[_Iterable[str]] = ..., etcd: _Optional[_Iterable[str]] = ..., lasts_s: _Optional[float] = ..., valid_s: _Optional[float] = ..., again: _Optional[bool] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("secret", "ca_sha256")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CA_SHA256_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    ca_sha256: bytes
    def __init__(self, secret: _Optional[bytes] = ..., ca_sha256: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: str
    def __init__(self, certificate: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("job", "forwarded")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    job: str
    forwarded: bool
    def __init__(self, job: _Optional[str] = ..., forwarded: _Optional[bool] = ...) -> None: ...

class WorkerTrace(_message.Message):
    __slots__ = ("node", "worker", "trouble", "operations", "clock_ahead_s", "clock_error_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    worker: int
    trouble: str
    operations: RecentOperations
    clock_ahead_s: float
    clock_error_s: float
    def __init__(self, node: _Optional[str] = ..., worker: _Optional[int] = ..., trouble: _Optional[str] = ..., operations: _Optional[_Union[RecentOperations, _Mapping]] = ..., clock_ahead_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ...) -> None: ...

class TryFolderRequest(_message.Message):
    __slots__ = ("checkpoint_dir",)
    CHECKPOINT_DIR_FIELD_NUMBER: _ClassVar[int]
    checkpoint_dir: str
    def __init__(self, checkpoint_dir: _Optional[str] = ...) -> None: ...

class TryFolderReply(_message.Message):
    __slots__ = ("reason", "lacks_access")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LACKS_ACCESS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    lacks_access: bool
    def __init__(self, reason: _Optional[str] = ..., lacks_access: _Optional[bool] = ...) -> None: ...

class DialPeersRequest(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class DialPeersReply(_message.Message):
    __slots__ = ("ports",)
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedCompositeFieldContainer[DialledPort]
    def __init__(self, ports: _Optional[_Iterable[_Union[DialledPort, _Mapping]]] = ...) -> None: ...

class DialledPort(_message.Message):
    __slots__ = ("node", "port", "address", "reason", "seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    port: str
    address: str
    reason: str
    seconds: float
    def __init__(self, node: _Optional[str] = ..., port: _Optional[str] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("num_bytes", "counted")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    counted: bool
    def __init__(self, num_bytes: _Optional[int] = ..., counted: _Optional[bool] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("data", "num_segments", "num_lost")
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUM_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    num_segments: int
    num_lost: int
    def __init__(self, data: _Optional[bytes] = ..., num_segments: _Optional[int] = ..., num_lost: _Optional[int] = ...) -> None: ...

class StandByRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class StandByReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class AccompanyRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class AccompanyReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "etcd_reachable", "etcd_away_s", "jobs", "waits_for")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ETCD_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ETCD_AWAY_S_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    node: str
    etcd_reachable: bool
    etcd_away_s: float
    jobs: bytes
    waits_for: str
    def __init__(self, node: _Optional[str] = ..., etcd_reachable: _Optional[bool] = ..., etcd_away_s: _Optional[float] = ..., jobs: _Optional[bytes] = ..., waits_for: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("rival",)
    RIVAL_FIELD_NUMBER: _ClassVar[int]
    rival: str
    def __init__(self, rival: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("node", "incarnation", "protocol", "etcd_reachable", "leader", "clock_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ETCD_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    protocol: int
    etcd_reachable: bool
    leader: str
    clock_s: float
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol: _Optional[int] = ..., etcd_reachable: _Optional[bool] = ..., leader: _Optional[str] = ..., clock_s: _Optional[float] = ...) -> None: ...

class FetchStateRequest(_message.Message):
    __slots__ = ("job", "timeline", "boundary", "layer", "offset", "forward", "unhurried")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    UNHURRIED_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    boundary: int
    layer: str
    offset: int
    forward: bool
    unhurried: bool
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., boundary: _Optional[int] = ..., layer: _Optional[str] = ..., offset: _Optional[int] = ..., forward: _Optional[bool] = ..., unhurried: _Optional[bool] = ...) -> None: ...

class FetchDataRequest(_message.Message):
    __slots__ = ("sha256", "offset", "data_sha256", "forward_file")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_SHA256_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FILE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    data_sha256: str
    forward_file: str
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., data_sha256: _Optional[str] = ..., forward_file: _Optional[str] = ...) -> None: ...

class HasDataRequest(_message.Message):
    __slots__ = ("sha256", "source")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    source: str
    def __init__(self, sha256: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class HasDataReply(_message.Message):
    __slots__ = ("is_here", "free_bytes", "there_bytes")
    IS_HERE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    THERE_BYTES_FIELD_NUMBER: _ClassVar[int]
    is_here: bool
    free_bytes: int
    there_bytes: int
    def __init__(self, is_here: _Optional[bool] = ..., free_bytes: _Optional[int] = ..., there_bytes: _Optional[int] = ...) -> None: ...

class GivenData(_message.Message):
    __slots__ = ("sha256", "piece", "is_last", "error")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    piece: bytes
    is_last: bool
    error: str
    def __init__(self, sha256: _Optional[str] = ..., piece: _Optional[bytes] = ..., is_last: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class WantedData(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job", "node", "follow", "last_lines", "forwarded")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LAST_LINES_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    follow: bool
    last_lines: int
    forwarded: bool
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., follow: _Optional[bool] = ..., last_lines: _Optional[int] = ..., forwarded: _Optional[bool] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("node", "text")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    node: str
    text: str
    def __init__(self, node: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class JournalRequest(_message.Message):
    __slots__ = ("job", "from_batch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FROM_BATCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    from_batch: int
    def __init__(self, job: _Optional[str] = ..., from_batch: _Optional[int] = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("batch", "loss", "tokens", "seconds", "generation", "microbatch_losses", "eval_loss")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_LOSSES_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    loss: float
    tokens: int
    seconds: float
    generation: int
    microbatch_losses: _containers.RepeatedScalarFieldContainer[float]
    eval_loss: float
    def __init__(self, batch: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., generation: _Optional[int] = ..., microbatch_losses: _Optional[_Iterable[float]] = ..., eval_loss: _Optional[float] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("hello", "prepared", "started", "stop_chosen", "at_boundary", "wrote", "released", "progress", "heartbeat", "refused", "snapshot_missed", "recent_operations")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STOP_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    AT_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    WROTE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_MISSED_FIELD_NUMBER: _ClassVar[int]
    RECENT_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    prepared: Prepared
    started: Started
    stop_chosen: StopChosen
    at_boundary: AtBoundary
    wrote: Wrote
    released: Released
    progress: Progress
    heartbeat: Heartbeat
    refused: Refused
    snapshot_missed: SnapshotMissed
    recent_operations: RecentOperations
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., stop_chosen: _Optional[_Union[StopChosen, _Mapping]] = ..., at_boundary: _Optional[_Union[AtBoundary, _Mapping]] = ..., wrote: _Optional[_Union[Wrote, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., snapshot_missed: _Optional[_Union[SnapshotMissed, _Mapping]] = ..., recent_operations: _Optional[_Union[RecentOperations, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol", "incarnation", "pid", "link_port", "device_index")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LINK_PORT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    incarnation: str
    pid: int
    link_port: int
    device_index: int
    def __init__(self, protocol: _Optional[int] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., link_port: _Optional[int] = ..., device_index: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StopChosen(_message.Message):
    __slots__ = ("job", "generation", "boundary")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    boundary: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class AtBoundary(_message.Message):
    __slots__ = ("job", "generation", "boundary", "best_batch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    BEST_BATCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    boundary: int
    best_batch: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ..., best_batch: _Optional[int] = ...) -> None: ...

class WrittenFile(_message.Message):
    __slots__ = ("layer", "path", "size_bytes", "checksum")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    layer: str
    path: str
    size_bytes: int
    checksum: str
    def __init__(self, layer: _Optional[str] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class Wrote(_message.Message):
    __slots__ = ("job", "generation", "boundary", "files", "timeline", "is_snapshot")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    boundary: int
    files: _containers.RepeatedCompositeFieldContainer[WrittenFile]
    timeline: int
    is_snapshot: bool
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ..., files: _Optional[_Iterable[_Union[WrittenFile, _Mapping]]] = ..., timeline: _Optional[int] = ..., is_snapshot: _Optional[bool] = ...) -> None: ...

class SnapshotMissed(_message.Message):
    __slots__ = ("job", "generation", "boundary", "reason", "factor", "written")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    boundary: int
    reason: str
    factor: int
    written: bool
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ..., reason: _Optional[str] = ..., factor: _Optional[int] = ..., written: _Optional[bool] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("job", "generation", "entries")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    entries: _containers.RepeatedCompositeFieldContainer[JournalEntry]
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[JournalEntry, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("job", "generation", "operations", "runnable", "batch", "waiting_for", "typical_s", "seconds", "num_replayed", "num_resumed", "layers", "peak_bytes", "num_samples", "replan_s", "device_speed", "steps", "expected_s", "awaited_worker", "broken_links", "device_bfloat16_speed")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LayerSeconds
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LayerSeconds, _Mapping]] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNABLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REPLAN_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SPEED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    AWAITED_WORKER_FIELD_NUMBER: _ClassVar[int]
    BROKEN_LINKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BFLOAT16_SPEED_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    operations: int
    runnable: bool
    batch: int
    waiting_for: str
    typical_s: float
    seconds: _containers.ScalarMap[str, float]
    num_replayed: int
    num_resumed: int
    layers: _containers.MessageMap[str, LayerSeconds]
    peak_bytes: int
    num_samples: int
    replan_s: float
    device_speed: float
    steps: int
    expected_s: float
    awaited_worker: int
    broken_links: _containers.RepeatedScalarFieldContainer[int]
    device_bfloat16_speed: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., operations: _Optional[int] = ..., runnable: _Optional[bool] = ..., batch: _Optional[int] = ..., waiting_for: _Optional[str] = ..., typical_s: _Optional[float] = ..., seconds: _Optional[_Mapping[str, float]] = ..., num_replayed: _Optional[int] = ..., num_resumed: _Optional[int] = ..., layers: _Optional[_Mapping[str, LayerSeconds]] = ..., peak_bytes: _Optional[int] = ..., num_samples: _Optional[int] = ..., replan_s: _Optional[float] = ..., device_speed: _Optional[float] = ..., steps: _Optional[int] = ..., expected_s: _Optional[float] = ..., awaited_worker: _Optional[int] = ..., broken_links: _Optional[_Iterable[int]] = ..., device_bfloat16_speed: _Optional[float] = ...) -> None: ...

class LayerSeconds(_message.Message):
    __slots__ = ("forward_s", "backward_s", "update_s", "spread")
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    forward_s: float
    backward_s: float
    update_s: float
    spread: float
    def __init__(self, forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., update_s: _Optional[float] = ..., spread: _Optional[float] = ...) -> None: ...

class RecentOperations(_message.Message):
    __slots__ = ("request", "job", "generation", "worker", "launched", "kinds", "batches", "microbatches", "versions", "started_s", "ended_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAUNCHED_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    request: int
    job: str
    generation: int
    worker: int
    launched: bool
    kinds: bytes
    batches: _containers.RepeatedScalarFieldContainer[int]
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    started_s: _containers.RepeatedScalarFieldContainer[float]
    ended_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request: _Optional[int] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., worker: _Optional[int] = ..., launched: _Optional[bool] = ..., kinds: _Optional[bytes] = ..., batches: _Optional[_Iterable[int]] = ..., microbatches: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., started_s: _Optional[_Iterable[float]] = ..., ended_s: _Optional[_Iterable[float]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("job", "generation", "reason", "fault", "hopeless", "damaged_path", "batch", "lost_peer", "unreached", "shortage")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_PATH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOST_PEER_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    reason: str
    fault: str
    hopeless: bool
    damaged_path: str
    batch: int
    lost_peer: int
    unreached: bool
    shortage: OutOfMemory
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., fault: _Optional[str] = ..., hopeless: _Optional[bool] = ..., damaged_path: _Optional[str] = ..., batch: _Optional[int] = ..., lost_peer: _Optional[int] = ..., unreached: _Optional[bool] = ..., shortage: _Optional[_Union[OutOfMemory, _Mapping]] = ...) -> None: ...

class OutOfMemory(_message.Message):
    __slots__ = ("wanted_bytes", "allocated_bytes", "allowed_bytes")
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_BYTES_FIELD_NUMBER: _ClassVar[int]
    wanted_bytes: int
    allocated_bytes: int
    allowed_bytes: int
    def __init__(self, wanted_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., allowed_bytes: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("prepare", "start", "choose_stop", "stop_at", "write", "release", "quit", "space_snapshots", "tell_operations", "trim_journal")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    QUIT_FIELD_NUMBER: _ClassVar[int]
    SPACE_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TELL_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TRIM_JOURNAL_FIELD_NUMBER: _ClassVar[int]
    prepare: Prepare
    start: Start
    choose_stop: ChooseStop
    stop_at: StopAt
    write: Write
    release: Release
    quit: Quit
    space_snapshots: SpaceSnapshots
    tell_operations: TellOperations
    trim_journal: TrimJournal
    def __init__(self, prepare: _Optional[_Union[Prepare, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., choose_stop: _Optional[_Union[ChooseStop, _Mapping]] = ..., stop_at: _Optional[_Union[StopAt, _Mapping]] = ..., write: _Optional[_Union[Write, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., quit: _Optional[_Union[Quit, _Mapping]] = ..., space_snapshots: _Optional[_Union[SpaceSnapshots, _Mapping]] = ..., tell_operations: _Optional[_Union[TellOperations, _Mapping]] = ..., trim_journal: _Optional[_Union[TrimJournal, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("job", "job_name", "generation", "stage", "data_paths", "log_path", "device_index", "data_states")
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_PATHS_FIELD_NUMBER: _ClassVar[int]
    LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_STATES_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    job_name: str
    generation: int
    stage: StageAssignment
    data_paths: _containers.RepeatedScalarFieldContainer[str]
    log_path: str
    device_index: int
    data_states: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[bytes] = ..., job_name: _Optional[str] = ..., generation: _Optional[int] = ..., stage: _Optional[_Union[StageAssignment, _Mapping]] = ..., data_paths: _Optional[_Iterable[str]] = ..., log_path: _Optional[str] = ..., device_index: _Optional[int] = ..., data_states: _Optional[_Iterable[str]] = ...) -> None: ...

class StageAssignment(_message.Message):
    __slots__ = ("index", "num_stages", "layers", "depth", "groups", "worker", "upstream_codec", "downstream_codec", "group_by_group", "recompute", "shares_update")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_CODEC_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_CODEC_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    SHARES_UPDATE_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_stages: int
    layers: _containers.RepeatedScalarFieldContainer[str]
    depth: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    worker: int
    upstream_codec: int
    downstream_codec: int
    group_by_group: bool
    recompute: str
    shares_update: bool
    def __init__(self, index: _Optional[int] = ..., num_stages: _Optional[int] = ..., layers: _Optional[_Iterable[str]] = ..., depth: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., worker: _Optional[int] = ..., upstream_codec: _Optional[int] = ..., downstream_codec: _Optional[int] = ..., group_by_group: _Optional[bool] = ..., recompute: _Optional[str] = ..., shares_update: _Optional[bool] = ...) -> None: ...

class LayerSource(_message.Message):
    __slots__ = ("layer", "live", "initial", "path")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    layer: str
    live: bool
    initial: bool
    path: str
    def __init__(self, layer: _Optional[str] = ..., live: _Optional[bool] = ..., initial: _Optional[bool] = ..., path: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("stage", "address", "incarnation", "worker", "groups", "collective", "node")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    address: str
    incarnation: str
    worker: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    collective: bool
    node: str
    def __init__(self, stage: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., worker: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., collective: _Optional[bool] = ..., node: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("job_name", "generation", "timeline", "boundary", "stage", "sources", "upstream", "downstream", "siblings", "tied", "source_timeline", "snapshot_dir", "snapshot_live", "furthest", "source_job", "neighbours_load_s", "patience_s")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    TIED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DIR_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LIVE_FIELD_NUMBER: _ClassVar[int]
    FURTHEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_JOB_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    timeline: int
    boundary: int
    stage: StageAssignment
    sources: _containers.RepeatedCompositeFieldContainer[LayerSource]
    upstream: _containers.RepeatedCompositeFieldContainer[Peer]
    downstream: _containers.RepeatedCompositeFieldContainer[Peer]
    siblings: _containers.RepeatedCompositeFieldContainer[Peer]
    tied: _containers.RepeatedCompositeFieldContainer[Peer]
    source_timeline: int
    snapshot_dir: str
    snapshot_live: bool
    furthest: int
    source_job: str
    neighbours_load_s: float
    patience_s: float
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., boundary: _Optional[int] = ..., stage: _Optional[_Union[StageAssignment, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[LayerSource, _Mapping]]] = ..., upstream: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., downstream: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., siblings: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., tied: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., source_timeline: _Optional[int] = ..., snapshot_dir: _Optional[str] = ..., snapshot_live: _Optional[bool] = ..., furthest: _Optional[int] = ..., source_job: _Optional[str] = ..., neighbours_load_s: _Optional[float] = ..., patience_s: _Optional[float] = ...) -> None: ...

class ChooseStop(_message.Message):
    __slots__ = ("job_name", "generation")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StopAt(_message.Message):
    __slots__ = ("job_name", "generation", "boundary")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    boundary: int
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class Write(_message.Message):
    __slots__ = ("job_name", "generation", "timeline", "boundary", "layers", "directory")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    timeline: int
    boundary: int
    layers: _containers.RepeatedScalarFieldContainer[str]
    directory: str
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., boundary: _Optional[int] = ..., layers: _Optional[_Iterable[str]] = ..., directory: _Optional[str] = ...) -> None: ...

class SpaceSnapshots(_message.Message):
    __slots__ = ("job_name", "generation", "factor")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    factor: int
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ..., factor: _Optional[int] = ...) -> None: ...

class TrimJournal(_message.Message):
    __slots__ = ("job_name", "generation", "boundary")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    generation: int
    boundary: int
    def __init__(self, job_name: _Optional[str] = ..., generation: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("job_name",)
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    def __init__(self, job_name: _Optional[str] = ...) -> None: ...

class TellOperations(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Quit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
