"""Fills in what a job file leaves to the devices: on cards, bfloat16, a loss in chunks, recomputation by plan. Pure.

On other devices nothing changes, so a job keeps the bits that it had. Each key counts by itself, and a key that the
file names is never touched.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.data_choices import OF_THE_DELAY
from headway.daemon.jobs.job import JobSpec
from headway.stages.attention_kernels import FASTEST_FIRST, Kernel, KernelDevice, computes_bfloat16, why_not
from headway.stages.spec import AUTO, ModelSpec, TrainSpec


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
        why_not(
            kernel,
            spec.model,
            spec.train,
            device_kind=device.kind,
            capability=device.capability,
            flash3=device.flash3,
        )
        for device in devices
    ]


DTYPE: Final = "train.dtype"
NEWTON_SCHULZ: Final = "optim.matrices.newton_schulz_dtype"
LOSS_CHUNK: Final = "train.loss_chunk"
LOSS_GRADIENT: Final = "train.loss_gradient"
RECOMPUTE: Final = "train.recompute"
SPLIT_BLOCKS: Final = "placement.split_blocks"

FILLED_IN: Final = (DTYPE, NEWTON_SCHULZ, LOSS_CHUNK, LOSS_GRADIENT, RECOMPUTE)

_MOST_LOGITS: Final = 1 << 28
"""Logits that exist at once by default: 3.2 GB in the backward. Each chunk also reads the head's matrix, and reads and
writes the sum of its gradients; with a vocabulary of 2¹⁷ a card multiplies longer than that from 2048 rows on.
"""


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
    chosen = {DTYPE: "bfloat16", NEWTON_SCHULZ: "bfloat16", LOSS_CHUNK: _loss_chunk(spec.model, spec.train)}
    filled_in = _filled_in(spec, named, chosen | {RECOMPUTE: "auto"})
    return _filled_in(filled_in, named, {LOSS_GRADIENT: _loss_gradient(filled_in.model, filled_in.train)})


def with_those_of(spec: JobSpec, origin: JobSpec, *, named: Collection[str]) -> JobSpec:
    """Return the job with the keys that it leaves open as in the job that it continues, whose layers it takes over."""
    chosen = {key: origin.value_of(key) for key in (*FILLED_IN, *OF_THE_DELAY, SPLIT_BLOCKS)}
    filled_in = _filled_in(spec, named, chosen)
    if spec.train.schedule != AUTO:
        return filled_in
    keys = ("train.schedule",) if origin.train.delay else ("train.schedule", "train.sync_batches")
    return filled_in.with_values({key: origin.value_of(key) for key in keys})


def with_optimizers_of(spec: JobSpec, origin: JobSpec, *, named: Collection[str]) -> JobSpec:
    """Return the job with each optimizer of which its file says nothing as in the job that it continues, whose state it
    takes over. A plug-in has to be named, with its wheel.
    """
    keys = ("optim.matrices", "optim.rest", "optim.error_feedback")
    left_out = [key for key in keys if not any(name == key or name.startswith(f"{key}.") for name in named)]
    known = {key: origin.value_of(key) for key in left_out}
    return spec.with_values({key: value for key, value in known.items() if not getattr(value, "is_plugin", False)})


def _filled_in(spec: JobSpec, named: Collection[str], chosen: Mapping[str, object]) -> JobSpec:
    values = {key: value for key, value in chosen.items() if key not in named}
    if not spec.optim.matrices.kind.newton_schulz:
        values.pop(NEWTON_SCHULZ, None)
    if spec.train.has_own_loss and LOSS_CHUNK in values:  # it has all logits at once
        values[LOSS_CHUNK] = 0
    if not values.get(LOSS_CHUNK, spec.train.loss_chunk) or spec.model.has_adapter:  # nothing is added up
        values.pop(LOSS_GRADIENT, None)
    return spec.with_values(values)


def what_was_filled_in(before: JobSpec, after: JobSpec) -> str:
    """Return the keys that the devices have decided, with their values, for people; empty: none."""
    values = {key: after.value_of(key) for key in FILLED_IN}
    return ", ".join(f"{key} = {value}" for key, value in values.items() if value != before.value_of(key))


def why_float32(spec: JobSpec, devices: Iterable[KernelDevice], *, named: Collection[str] | None) -> str:
    """Return which devices keep a job in float32 that leaves its dtype open, though others compute bfloat16; empty:
    none do. spec: with everything fixed.
    """
    if named is None or DTYPE in named or spec.train.dtype != "float32":
        return ""
    devices = tuple(devices)
    slow = [device for device in devices if not computes_bfloat16(device)]
    if len(slow) in (0, len(devices)):
        return ""
    kinds = sorted({f"compute capability {device.capability}" if device.capability else device.kind for device in slow})
    what = f"{len(slow)} of {len(devices)} devices have no products in bfloat16 ({', '.join(kinds)})"
    return f'the job computes in float32, because {what}; name train.dtype = "bfloat16" if it should leave them out'


def _loss_chunk(model: ModelSpec, train: TrainSpec) -> int:
    """Return 0 if all logits of a microbatch are few enough, else the largest power of two of rows with few enough."""
    rows = train.microbatch_size * train.sequence_length
    if rows * model.vocab_size <= _MOST_LOGITS:
        return 0
    return 1 << (_MOST_LOGITS // model.vocab_size).bit_length() - 1


def _loss_gradient(model: ModelSpec, train: TrainSpec) -> str:
    """Return `whole` where the gradients of all logits take no more memory than a chunk's matrix beside the sum."""
    size = 2 if train.dtype == "bfloat16" else 4
    tokens = train.microbatch_size * train.sequence_length
    return "whole" if size * tokens <= (4 + size) * model.hidden_size else "chunks"
