"""A job's own code: a wheel that is read and tried when the job is submitted, and imported where the job computes.

It travels as a data set of bytes, whose one shard is the wheel. Its modules are imported from that file as it is:
nothing is unpacked or installed, and what it needs must be on the machine. What belongs to Headway or is installed goes
before it.
"""

import hashlib
import io
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import DataSpec, JobSpec, PluginsSpec
from headway.optim.spec import KeptState
from headway.stages.plugin_names import IMPORTED, PluginError, told_by

MAX_WHEEL_BYTES: Final = 16 << 20
IMPORT_S: Final = 30.0
"""Time to import all plug-ins of a job."""
TRIAL_S: Final = 300.0
"""Time to import torch and the plug-ins, and to try them: an optimizer is stepped for each shape of the model."""
SOURCE_S: Final = 3600.0
"""Time for a source to yield all of its documents."""
MOST_SAID: Final = 200
"""Characters of the last line that a trial writes."""
LAST_LINE_S: Final = 1.0
"""Time for that line to be read after the trial."""
_COMPILED: Final = (".so", ".pyd", ".dylib")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial has found out of a job's plug-ins; a plan counts with it."""

    fault: str = ""
    """What is wrong; empty: nothing."""
    matrices: tuple[KeptState, ...] = ()
    rest: tuple[KeptState, ...] = ()
    block_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    block_flops: float = 0.0
    block_values: int = 0


def with_plugins(spec: JobSpec, *, job_file: Path, cache_dir: Path) -> JobSpec:
    """Return the job with its wheel's hash, and what its plug-ins need. Blocks for seconds if it has any.

    Raises ConfigError: no wheel, another one than the job's sha256, or plug-ins that fail or break a rule.
    """
    if not spec.plugins.wheel:
        return spec
    path = (job_file.parent / Path(spec.plugins.wheel).expanduser()).resolve()
    wheel, where = _read_wheel(path, f"{job_file}:plugins.wheel"), f"{job_file}:plugins"
    sha256 = hashlib.sha256(wheel).hexdigest()
    if spec.plugins.sha256 not in ("", sha256):
        what = f"{path.name} is {sha256[:12]}…, not {spec.plugins.sha256[:12]}…; correct the hash or the wheel"
        raise ConfigError(what, f"{where}.sha256")
    data = _as_data(wheel, cache_dir / "plugins" / sha256)
    known = replace(spec, plugins=replace(spec.plugins, wheel=path.name, sha256=sha256, data=data))
    folder, is_source = _folder_of_source(known, cache_dir), "data.source" in spec.plugin_names
    trial = _tried(known, folder)
    if trial.fault:
        raise ConfigError(trial.fault, f"{where}.wheel")
    if is_source:
        known = replace(known, data=DataSpec(source=str(folder), sha256=spec.data.sha256))
    if not known.plugin_names:  # the nodes need no code
        return replace(known, plugins=PluginsSpec())
    counted = {
        "optim.matrices.kept": trial.matrices,
        "optim.rest.kept": trial.rest,
        "model.block_shapes": trial.block_shapes,
        "plugins.block_flops": trial.block_flops,
        "plugins.block_values": trial.block_values,
    }
    return known.with_values(counted)


def _read_wheel(path: Path, where: str) -> bytes:
    """Return the bytes of a wheel, or of one made of a module: equal modules give equal bytes. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_WHEEL_BYTES + 1)
        if len(raw) > MAX_WHEEL_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_WHEEL_BYTES >> 20} MiB; leave data and weights out", where)
        if path.suffix == ".py":
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as archive:
                archive.writestr(zipfile.ZipInfo(path.name), raw)
            return made.getvalue()
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            compiled = next((name for name in archive.namelist() if name.endswith(_COMPILED)), "")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", where) from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{path} is neither a wheel nor a .py file: {error}; `pip wheel . --no-deps` makes one", where
        ) from error
    if compiled:
        raise ConfigError(f"{path} has compiled code, {compiled}; a plug-in is Python alone", where)
    return raw


def _as_data(wheel: bytes, folder: Path) -> DataSpec:
    """Return the wheel as a data set of bytes in a folder. Raises ConfigError."""
    import numpy as np

    from headway.stages.data.shard_index import read_index
    from headway.stages.data.shard_writer import DataForm, writing_shards
    from headway.stages.errors import DataError

    try:
        with suppress(DataError), writing_shards(folder, DataForm(vocab_size=256), provenance="a wheel") as writer:
            writer.append(np.frombuffer(wheel, np.uint8))
        return DataSpec(source=str(folder), sha256=read_index(folder).sha256)
    except (DataError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        raise ConfigError(f"cannot be written: {reason}", str(folder)) from error


def _folder_of_source(spec: JobSpec, cache_dir: Path) -> Path:
    """Return where the tokens lie that a job's own source yields: equal code and settings have them once."""
    what = (spec.plugins.sha256, spec.data.source, spec.data.settings, spec.model.vocab_size)
    return cache_dir / "plugins" / hashlib.sha256(msgspec.json.encode(what)).hexdigest()


def _tried(spec: JobSpec, source_folder: Path) -> Trial:
    """Import and try a job's plug-ins in a process of their own, which has no more than TRIAL_S.

    source_folder: gets the tokens of a source, which may take SOURCE_S.
    """
    wheel, limit_s = spec.plugins.wheel, SOURCE_S if "data.source" in spec.plugin_names else TRIAL_S
    with tempfile.TemporaryDirectory() as folder, _last_line() as (last, stderr):
        job, told = Path(folder) / "job.json", Path(folder) / "trial.json"
        job.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-P", "-m", "headway.daemon.jobs.plugin_trial", str(told), str(source_folder)]
        try:
            with job.open("rb") as stdin:
                code = subprocess.run(
                    command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr, timeout=limit_s, check=False
                ).returncode
        except subprocess.TimeoutExpired:
            return Trial(fault=f"plug-in {wheel}: its trial takes longer than {limit_s:g} s")
        if told.exists():
            return msgspec.json.decode(told.read_bytes(), type=Trial)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return Trial(fault=f"plug-in {wheel}: its trial {how}: {''.join(last)}".rstrip(": "))


@contextmanager
def _last_line() -> Iterator[tuple[deque[str], int]]:
    """Give the last line, once the context has ended, that came to a file descriptor; any number may come.

    Whoever still has the descriptor is not waited for: a process that a plug-in left behind, for one.
    """
    last, (reading, writing) = deque[str](maxlen=1), os.pipe()

    def read() -> None:
        with os.fdopen(reading, "rb") as stream:
            while piece := stream.readline(MOST_SAID):
                last.extend(filter(None, [piece.decode(errors="replace").strip()]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield last, writing
    finally:
        os.close(writing)
        thread.join(LAST_LINE_S)


def import_plugins(spec: JobSpec, folder: Path) -> None:
    """Import what a job names from its wheel, as `imported` returns it. folder: the wheel as data.

    A process imports the plug-ins of one job in its life: another wheel could have modules of the same names. Raises
    PluginError: the wheel has another hash, the machine lacks a package, or the import fails or takes too long. It was
    imported where the job was submitted, so each of these `is_machines`.
    """
    if not spec.plugins.sha256:
        return
    try:
        _import(spec, folder)
    except PluginError as error:
        error.is_machines = True
        raise


def _import(spec: JobSpec, folder: Path) -> None:
    from headway.stages.data.shard_index import read_index

    wheel = folder / read_index(folder).shards[0].file
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != spec.plugins.sha256:
        what = f"the file in {folder} is {sha256[:12]}…, not {spec.plugins.sha256[:12]}…, so nothing of it is imported"
        raise PluginError(spec.plugins.wheel, what)
    if str(wheel) not in sys.path:
        sys.path.append(str(wheel))
    for key, name in spec.plugin_names.items():
        with told_by(name), _within(IMPORT_S, f"its import takes longer than {IMPORT_S:g} s"):
            module = name.partition(":")[0]
            try:
                found = pkgutil.resolve_name(module)
            except ModuleNotFoundError as error:
                is_own = module.split(".")[0] == (error.name or "").split(".")[0]
                what = f"{spec.plugins.wheel} has no module {error.name}" if is_own else f"needs {error.name}"
                what += "" if is_own else ", which is not installed on this machine, and a wheel brings nothing along"
                raise PluginError(name, f"{what} ({key})") from error
            if not str(getattr(found, "__file__", "")).startswith(str(wheel)):
                raise PluginError(name, "is another module of this machine, which goes before the wheel's; rename it")
            IMPORTED[name] = pkgutil.resolve_name(name)


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block when its time is over, if this is the main thread."""

    def end(*_: object) -> None:
        raise TimeoutError(what)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
