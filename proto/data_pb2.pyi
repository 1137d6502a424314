from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "job", "generation", "incarnation", "expected_incarnation", "next_sequence", "stage", "worker", "attempt")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    generation: int
    incarnation: str
    expected_incarnation: str
    next_sequence: int
    stage: int
    worker: int
    attempt: int
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., expected_incarnation: _Optional[str] = ..., next_sequence: _Optional[int] = ..., stage: _Optional[int] = ..., worker: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("verdict", "reason", "next_sequence", "incarnation", "plain_port", "token")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[HelloReply.Verdict]
        ACCEPTED: _ClassVar[HelloReply.Verdict]
        NOT_YET: _ClassVar[HelloReply.Verdict]
        STALE: _ClassVar[HelloReply.Verdict]
        WRONG_PROTOCOL: _ClassVar[HelloReply.Verdict]
        WRONG_PEER: _ClassVar[HelloReply.Verdict]
    VERDICT_UNSPECIFIED: HelloReply.Verdict
    ACCEPTED: HelloReply.Verdict
    NOT_YET: HelloReply.Verdict
    STALE: HelloReply.Verdict
    WRONG_PROTOCOL: HelloReply.Verdict
    WRONG_PEER: HelloReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLAIN_PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    verdict: HelloReply.Verdict
    reason: str
    next_sequence: int
    incarnation: str
    plain_port: int
    token: str
    def __init__(self, verdict: _Optional[_Union[HelloReply.Verdict, str]] = ..., reason: _Optional[str] = ..., next_sequence: _Optional[int] = ..., incarnation: _Optional[str] = ..., plain_port: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("dtype", "shape")
    class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DTYPE_UNSPECIFIED: _ClassVar[TensorSpec.DType]
        FLOAT32: _ClassVar[TensorSpec.DType]
        BFLOAT16: _ClassVar[TensorSpec.DType]
        FLOAT64: _ClassVar[TensorSpec.DType]
        INT64: _ClassVar[TensorSpec.DType]
        INT32: _ClassVar[TensorSpec.DType]
        UINT8: _ClassVar[TensorSpec.DType]
        INT8: _ClassVar[TensorSpec.DType]
    DTYPE_UNSPECIFIED: TensorSpec.DType
    FLOAT32: TensorSpec.DType
    BFLOAT16: TensorSpec.DType
    FLOAT64: TensorSpec.DType
    INT64: TensorSpec.DType
    INT32: TensorSpec.DType
    UINT8: TensorSpec.DType
    INT8: TensorSpec.DType
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: TensorSpec.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[TensorSpec.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("kind", "generation", "batch", "microbatch", "sequence", "acknowledged", "tensors", "payload_bytes", "payload_offset", "is_attached", "key", "value", "codec")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[FrameHeader.Kind]
        ACTIVATION: _ClassVar[FrameHeader.Kind]
        GRADIENT: _ClassVar[FrameHeader.Kind]
        NORM_SQUARES: _ClassVar[FrameHeader.Kind]
        NORM_TOTAL: _ClassVar[FrameHeader.Kind]
        SUMS: _ClassVar[FrameHeader.Kind]
        REDUCED: _ClassVar[FrameHeader.Kind]
        LOSSES: _ClassVar[FrameHeader.Kind]
        STOP: _ClassVar[FrameHeader.Kind]
        UPDATE_SHARE: _ClassVar[FrameHeader.Kind]
        EVALUATION: _ClassVar[FrameHeader.Kind]
        TIED_SUMS: _ClassVar[FrameHeader.Kind]
        JOB_END: _ClassVar[FrameHeader.Kind]
        HEARTBEAT: _ClassVar[FrameHeader.Kind]
        GOODBYE: _ClassVar[FrameHeader.Kind]
        ATTACHING: _ClassVar[FrameHeader.Kind]
    KIND_UNSPECIFIED: FrameHeader.Kind
    ACTIVATION: FrameHeader.Kind
    GRADIENT: FrameHeader.Kind
    NORM_SQUARES: FrameHeader.Kind
    NORM_TOTAL: FrameHeader.Kind
    SUMS: FrameHeader.Kind
    REDUCED: FrameHeader.Kind
    LOSSES: FrameHeader.Kind
    STOP: FrameHeader.Kind
    UPDATE_SHARE: FrameHeader.Kind
    EVALUATION: FrameHeader.Kind
    TIED_SUMS: FrameHeader.Kind
    JOB_END: FrameHeader.Kind
    HEARTBEAT: FrameHeader.Kind
    GOODBYE: FrameHeader.Kind
    ATTACHING: FrameHeader.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    kind: FrameHeader.Kind
    generation: int
    batch: int
    microbatch: int
    sequence: int
    acknowledged: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    payload_bytes: int
    payload_offset: int
    is_attached: bool
    key: str
    value: bytes
    codec: int
    def __init__(self, kind: _Optional[_Union[FrameHeader.Kind, str]] = ..., generation: _Optional[int] = ..., batch: _Optional[int] = ..., microbatch: _Optional[int] = ..., sequence: _Optional[int] = ..., acknowledged: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., payload_offset: _Optional[int] = ..., is_attached: _Optional[bool] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ..., codec: _Optional[int] = ...) -> None: ...
