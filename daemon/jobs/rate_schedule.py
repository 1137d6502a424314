"""The schedule of a job's learning rates: its warm-up, its end, and what follows when a checkpoint lies there. Pure."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec

_WARMUP: Final = "optim.warmup_batches"
_WARMUP_SHARE: Final = 5
"""A short job that leaves the warm-up out has this part of its batches as warm-up: one fifth."""


def with_schedule(spec: JobSpec, source: str, *, named: Collection[str] | None = None) -> JobSpec:
    """Return the job with the warm-up that its file leaves out, shorter if the default takes the whole job.

    named: the keys of its file; None: all. Raises ConfigError for a warm-up without an end, and for a schedule whose
    end is unknown, beyond the job or followed by nothing.
    """
    optim, batches = spec.optim, spec.train.batches
    if named is not None and optim.warmup_batches >= batches:
        if _WARMUP in named:
            what = f"{optim.warmup_batches} batches of warm-up are all {batches} of the job: the rate would only rise"
            raise ConfigError(f"{what}; set it to {batches // _WARMUP_SHARE}, or train.batches higher", _at(source))
        optim = replace(optim, warmup_batches=batches // _WARMUP_SHARE)
    if why := _why_no_end(spec):
        raise ConfigError(why, _at(source, "after_end" if optim.after_end else "schedule_batches"))
    return replace(spec, optim=optim)


def _why_no_end(spec: JobSpec) -> str:
    """Return what is wrong with the end of a job's schedule; empty: nothing."""
    optim, batches = spec.optim, spec.train.batches
    if not (optim.after_end or optim.schedule_batches):
        return ""
    if optim.lr_schedule == "constant":
        return "a constant rate has no end; leave schedule_batches and after_end out"
    if not optim.schedule_batches:
        return "needs schedule_batches: where the schedule ends; `submit --from` has it from the checkpoint"
    if optim.schedule_batches > batches:
        return f"the schedule of {optim.schedule_batches} batches ends after the job of {batches}; make one of them fit"
    if not optim.after_end:
        return f'what follows batch {optim.schedule_batches}? Set after_end to "floor" or "warm_up_again"'
    left = batches - optim.schedule_batches
    if optim.after_end == "floor" and left and not optim.lr_floor:
        return "the rate would be 0 from then on, as lr_floor is; set optim.lr_floor to 0.1, for example"
    if optim.after_end == "warm_up_again" and left and optim.warmup_batches >= left:
        return f"{optim.warmup_batches} batches of warm-up are all {left} that are left; lower optim.warmup_batches"
    return ""


def schedule_end(spec: JobSpec) -> int:
    """Return the batch at which the last schedule of a job has ended."""
    follows = spec.optim.after_end == "warm_up_again" or not spec.optim.schedule_batches
    return spec.train.batches if follows else spec.optim.schedule_batches


def continued_schedule(spec: JobSpec, origin: JobSpec, boundary: int, source: str) -> JobSpec:
    """Return the job that begins at a boundary of another, with the batch at which that one's schedule ends.

    Raises ConfigError when it has ended, and the job does not say what follows.
    """
    optim, end = spec.optim, schedule_end(origin)
    if optim.after_end and not optim.schedule_batches:
        return replace(spec, optim=replace(optim, schedule_batches=end))
    kinds = {optim.lr_schedule, origin.optim.lr_schedule}
    if "constant" not in kinds and boundary >= end and not optim.after_end:
        what = f"the {origin.optim.lr_schedule} schedule of {origin.job.name} has ended at batch {end}; what follows?"
        ways = '"floor" keeps the rate at lr_floor, "warm_up_again" begins another schedule'
        raise ConfigError(f"{what} Set it: {ways}", _at(source, "after_end"))
    return spec


def _at(source: str, key: str = "warmup_batches") -> str:
    return f"{source}:optim.{key}"
