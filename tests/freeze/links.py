"""The bytes of frames on a link, the bounds that contracts set, and what compression makes of values."""

import hashlib
import importlib
from itertools import product
from types import ModuleType
from typing import Any

import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec, codec_between, coded_bytes, feedback_bytes
from headway.stages.links.compression import Feedback, decode, encode
from headway.stages.links.frame_contract import SIBLING_KINDS, FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8)
CHUNKS = (16 << 10, 64 << 10, 1 << 20)


def _module(*names: str) -> ModuleType:
    for name in names:
        try:
            return importlib.import_module(f"headway.stages.links.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {names}")


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()[:32]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 50
    return made.to(dtype)


def _frame(kind: FrameKind, codec: Codec, *tensors: torch.Tensor) -> Frame:
    return Frame(kind, Generation(3), Batch(1 << 40), MicrobatchIndex(12), tensors, codec)


def _frames() -> dict[str, Frame]:
    frames = {
        f"{dtype}-{len(shape)}": _frame(FrameKind.ACTIVATION, Codec.NONE, _values(dtype, *shape))
        for dtype, shape in product(DTYPES, ((), (0,), (5,), (3, 129, 7), (64, 1024)))
    }
    hidden, rows = _values(torch.float32, 2, 64, 257), torch.arange(128).view(2, 64)
    for codec in Codec:
        frames[f"coded-{codec.name}"] = _frame(FrameKind.ACTIVATION, codec, *encode(hidden, codec), rows)
    for kind in FrameKind:
        frames[f"kind-{kind.name}"] = _frame(kind, Codec.NONE, _values(torch.float64, 3))
    frames["strided"] = _frame(FrameKind.GRADIENT, Codec.NONE, hidden.transpose(1, 2))
    return frames


def _on_the_wire() -> dict[str, str]:
    codec = _module("frame_codec", "grpc.frame_codec")
    bundling = codec if hasattr(codec, "bundles") else _module("grpc.frame_bundle")
    has_goodbye = hasattr(codec, "Goodbye")

    def outgoing_frame(frame: Frame | None, sequence: int) -> Any:
        if not has_goodbye:
            return codec.OutgoingFrame(frame, Generation(3), sequence=sequence)
        return (
            codec.OutgoingFrame(frame, sequence=sequence) if frame else codec.Goodbye(Generation(3), sequence=sequence)
        )

    found = {}
    for (name, frame), size in product(_frames().items(), CHUNKS):
        outgoing = outgoing_frame(frame, 41)
        messages = [b"".join(bytes(part) for part in parts) for parts in outgoing.messages(lambda: 9, chunk_bytes=size)]
        found[f"message-{name}-{size}"] = _digest(*messages, outgoing.payload_bytes)
    waiting = iter([outgoing_frame(frame, i) for i, frame in enumerate([*_frames().values(), None])])
    made = [b"".join(map(bytes, b)) for b in bundling.bundles(lambda: next(waiting, None), lambda: 4, lambda: 1 << 16)]
    found["bundles"] = _digest(*[hashlib.sha256(one).digest() for one in made], len(made))
    found["heartbeat"] = _digest(bundling.bundle(codec.heartbeat(Generation(3), sequence=5, acknowledged=4)))
    return found


def _contracts() -> dict[str, str]:
    model = ModelSpec(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    found = {}
    for wire, evaluates, mask in product(("none", "bf16", "int8"), (0, 5), (False, True)):
        changes: dict[str, Any] = {"wire": wire, "eval_every": evaluates}
        train = TrainSpec(sequence_length=16, microbatch_size=2, microbatches=4, batches=9, **changes)
        codec = codec_between(train, is_between_sites=True)
        own = FrameContract.of(model, train, has_norms=mask, has_ties=mask, activations=codec, gradients=codec)
        found[f"contract-{wire}-{evaluates}-{mask}"] = _digest(
            sorted((int(kind), forms) for kind, forms in own.forms.items()),
            *(own.max_unacknowledged_frames, own.max_unacknowledged_bytes, own.max_frame_bytes),
            *(feedback_bytes(train, 640), coded_bytes(codec, 640, 4)),
        )
    train = TrainSpec(sequence_length=16, microbatch_size=2, microbatches=4, batches=9, reduction_groups=4)
    layers = layer_names(model)
    for own_index, sibling in ((0, 1), (1, 0)):
        both = FrameContract.between_replicas(
            model, train, layers=layers, replica_groups=((0, 1), (2, 3)), own=own_index, sibling=sibling
        )
        found[f"replicas-{own_index}"] = _digest(
            sorted((int(kind), forms) for kind, forms in both.forms.items()),
            sorted((int(kind), forms) for kind, forms in both.sent_forms.items()),
            *(both.max_unacknowledged_bytes, sorted(map(int, SIBLING_KINDS))),
        )
    form = TensorForm(torch.float32, (4, 8), may_be_shorter=True)
    small = FrameContract({FrameKind.GRADIENT: (form,)}, 3, codecs={FrameKind.GRADIENT: Codec.NONE})
    cases = [(torch.float32, (3, 8)), (torch.float32, (5, 8)), (torch.float64, (4, 8)), (torch.float32, (4,))]
    found["violations"] = _digest(
        *(small.violation(kind, [case], codec) for kind in FrameKind for case in cases for codec in (0, 1, 7))
    )
    return found


def _compression() -> dict[str, str]:
    found = {}
    for codec, dtype, size in product(Codec, (torch.float32, torch.bfloat16), (1, 63, 64, 640, 1000)):
        values = _values(dtype, size)
        values[0] = 0.0
        coded = encode(values, codec)
        back = decode(coded, codec, dtype)
        found[f"coded-{codec.name}-{dtype}-{size}"] = _digest(*map(_bytes, coded), _bytes(back))
    feedback, sent = Feedback(Codec.INT8, num_groups=2), []
    for number in range(6):
        sent += [_bytes(each) for each in feedback.encode(_values(torch.float32, 130) * (number + 1), number)]
    found["feedback"] = _digest(*sent)
    odd = torch.tensor([float("nan"), float("inf"), 1e-38, 3e38])
    found["odd"] = _digest(*map(_bytes, encode(odd, Codec.INT8)))
    return found


def record() -> dict[str, str]:
    """Messages, bundles, contracts and coded values, as digests."""
    return {**_on_the_wire(), **_contracts(), **_compression()}
