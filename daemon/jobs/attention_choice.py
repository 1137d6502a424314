"""Chooses a job's kernel of attention from its shapes, its dtype and the devices that may compute it. Pure."""

from collections.abc import Iterable

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.stages.attention_kernels import FASTEST_FIRST, Kernel, KernelDevice, why_not


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
