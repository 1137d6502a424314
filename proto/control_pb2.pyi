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

class ReadRequest(_message.Message):
    __slots__ = ("layer", "shard", "offset", "forward", "unhurried")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    UNHURRIED_FIELD_NUMBER: _ClassVar[int]
    layer: LayerFile
    shard: ShardFile
    offset: int
    forward: bool
    unhurried: bool
    def __init__(self, layer: _Optional[_Union[LayerFile, _Mapping]] = ..., shard: _Optional[_Union[ShardFile, _Mapping]] = ..., offset: _Optional[int] = ..., forward: _Optional[bool] = ..., unhurried: _Optional[bool] = ...) -> None: ...

class LayerFile(_message.Message):
    __slots__ = ("job", "timeline", "boundary", "layer")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    boundary: int
    layer: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., boundary: _Optional[int] = ..., layer: _Optional[str] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("sha256", "data_sha256", "name")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DATA_SHA256_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    data_sha256: str
    name: str
    def __init__(self, sha256: _Optional[str] = ..., data_sha256: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("job", "from_batch", "every")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FROM_BATCH_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    job: str
    from_batch: int
    every: int
    def __init__(self, job: _Optional[str] = ..., from_batch: _Optional[int] = ..., every: _Optional[int] = ...) -> None: ...

class JournalRows(_message.Message):
    __slots__ = ("batch", "loss", "tokens", "seconds", "generation", "eval_loss", "gradient_norm", "next_batch", "final_eval_loss")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    FINAL_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    batch: _containers.RepeatedScalarFieldContainer[int]
    loss: _containers.RepeatedScalarFieldContainer[float]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    generation: _containers.RepeatedScalarFieldContainer[int]
    eval_loss: _containers.RepeatedScalarFieldContainer[float]
    gradient_norm: _containers.RepeatedScalarFieldContainer[float]
    next_batch: int
    final_eval_loss: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, batch: _Optional[_Iterable[int]] = ..., loss: _Optional[_Iterable[float]] = ..., tokens: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., generation: _Optional[_Iterable[int]] = ..., eval_loss: _Optional[_Iterable[float]] = ..., gradient_norm: _Optional[_Iterable[float]] = ..., next_batch: _Optional[int] = ..., final_eval_loss: _Optional[_Iterable[float]] = ...) -> None: ...

class RecentOperations(_message.Message):
    __slots__ = ("job", "generation", "worker", "launched", "kinds", "batches", "microbatches", "versions", "started_s", "ended_s")
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
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., worker: _Optional[int] = ..., launched: _Optional[bool] = ..., kinds: _Optional[bytes] = ..., batches: _Optional[_Iterable[int]] = ..., microbatches: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., started_s: _Optional[_Iterable[float]] = ..., ended_s: _Optional[_Iterable[float]] = ...) -> None: ...
