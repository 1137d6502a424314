"""Fills in what a job file leaves to the devices: on cards, bfloat16, a loss in chunks, recomputation by plan. Pure.

On other devices nothing changes, so a job keeps the bits that it had. Each key counts by itself, and a key that the
file names is never touched.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final, Literal

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.stages.attention_kernels import FASTEST_FIRST, Kernel, KernelDevice, computes_bfloat16, why_not
from headway.stages.spec import ModelSpec, TrainSpec


def attention_backend(spec: JobSpec, devices: Iterable[KernelDevice], source: str) -> Kernel:
    """Return the kernel of attention: the job's, or for `auto` the fastest that every device has for its shapes.

    Raises ConfigError when the job names one that no device has.
    """
    devices = tuple(devices)
    named = spec.train.attention_backend
    if named == "auto":
        return next(kernel for kernel in FASTEST_FIRST if not any(lacks_kernel(kernel, spec, devices)))
    reasons = lacks_kernel(named, spec, devices)
    if reasons and all(reasons):
        what = f'"{named}" does not fit this job: {reasons[0]}; set it to "auto"'
        raise ConfigError(what, f"{source}:train.attention_backend")
    return named


def lacks_kernel(kernel: Kernel, spec: JobSpec, devices: Iterable[KernelDevice]) -> list[str]:
    """Return for each device why it has no such kernel for the job; empty: it has one."""
    return [
        why_not(kernel, spec.model, spec.train, device_kind=device.kind, capability=device.capability)
        for device in devices
    ]


DTYPE: Final = "train.dtype"
NEWTON_SCHULZ: Final = "optim.matrices.newton_schulz_dtype"
LOSS_CHUNK: Final = "train.loss_chunk"
RECOMPUTE: Final = "train.recompute"

FILLED_IN: Final = frozenset({DTYPE, NEWTON_SCHULZ, LOSS_CHUNK, RECOMPUTE})

Dtype = Literal["float32", "bfloat16"]

_MOST_LOGITS: Final = 1 << 26
"""Logits that exist at once by default: 0.8 GB in the backward."""
_LEAST_CHUNK: Final = 128


def for_devices(
    spec: JobSpec, devices: Iterable[KernelDevice], *, source: str, named: Collection[str] | None = None
) -> JobSpec:
    """Return the job with everything fixed that depends on the devices. Raises ConfigError.

    named: the keys of its file; None: the job leaves none open.
    """
    devices = tuple(devices)
    if named is not None:
        spec = with_device_defaults(spec, devices, named=named)
    return replace(spec, train=replace(spec.train, attention_backend=attention_backend(spec, devices, source)))


def with_device_defaults(spec: JobSpec, devices: Iterable[KernelDevice], *, named: Collection[str]) -> JobSpec:
    """Return the job with the keys that it leaves open filled in. devices: those that may compute it.

    named: the keys of the job file, such as `train.dtype`.
    """
    devices = tuple(devices)
    if not devices or not all(computes_bfloat16(device) for device in devices):
        return spec
    chunk = 0 if spec.train.compile else _loss_chunk(spec.model, spec.train)
    spec = _filled_in(spec, named, dtype="bfloat16", newton_schulz_dtype="bfloat16", loss_chunk=chunk)
    return spec if RECOMPUTE in named else replace(spec, train=replace(spec.train, recompute="auto"))


def with_those_of(spec: JobSpec, origin: JobSpec, *, named: Collection[str]) -> JobSpec:
    """Return the job with the keys that it leaves open as in the job whose checkpoint it begins with."""
    spec = _filled_in(
        spec,
        named,
        dtype=origin.train.dtype,
        newton_schulz_dtype=origin.optim.matrices.newton_schulz_dtype,
        loss_chunk=0 if spec.train.compile else origin.train.loss_chunk,
    )
    if RECOMPUTE in named or spec.train.compile:  # compiled blocks are not computed again in part
        return spec
    return replace(spec, train=replace(spec.train, recompute=origin.train.recompute))


def _filled_in(
    spec: JobSpec, named: Collection[str], *, dtype: Dtype, newton_schulz_dtype: Dtype, loss_chunk: int
) -> JobSpec:
    train, matrices = spec.train, spec.optim.matrices
    if DTYPE not in named:
        train = replace(train, dtype=dtype)
    if LOSS_CHUNK not in named:
        train = replace(train, loss_chunk=loss_chunk)
    if NEWTON_SCHULZ not in named and matrices.name == "muon":
        matrices = replace(matrices, newton_schulz_dtype=newton_schulz_dtype)
    return replace(spec, train=train, optim=replace(spec.optim, matrices=matrices))


def what_was_filled_in(before: JobSpec, after: JobSpec) -> str:
    """Return the keys that the devices have decided, with their values, for people; empty: none."""
    ours, theirs = _values(after), _values(before)
    return ", ".join(f"{key} = {value}" for key, value in ours.items() if value != theirs[key])


def _loss_chunk(model: ModelSpec, train: TrainSpec) -> int:
    """Return 0 if all logits of a microbatch are few enough, else the largest power of two of rows with few enough."""
    rows = train.microbatch_size * train.sequence_length
    if rows * model.vocab_size <= _MOST_LOGITS:
        return 0
    return max(_LEAST_CHUNK, 1 << (_MOST_LOGITS // model.vocab_size).bit_length() - 1)


def _values(spec: JobSpec) -> dict[str, str | int]:
    return {
        DTYPE: spec.train.dtype,
        NEWTON_SCHULZ: spec.optim.matrices.newton_schulz_dtype,
        LOSS_CHUNK: spec.train.loss_chunk,
        RECOMPUTE: spec.train.recompute,
    }
