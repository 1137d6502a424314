"""Reads the folder with a job's initial weights before the job is submitted, and shows how far it is."""

import sys

from headway.daemon.jobs.job import JobSpec


def read_parts(spec: JobSpec) -> JobSpec:
    """Return the job with the digests of its folder, which is read once. Raises ConfigError. Blocks."""
    if not spec.origin.url:
        return spec
    from headway.daemon.origin.origin_model import with_parts  # imports torch, which other jobs do not need here
    from headway.daemon.terminal import behind

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            drawn = behind(sys.stderr)
            drawn.write(f"\r{spec.origin.url}: part {done}/{total} " + ("\n" if done == total else ""))
            drawn.flush()

    def warn(text: str) -> None:
        sys.stderr.write(f"headway: {text}\n")

    return with_parts(spec, on_part=show, warn=warn)
