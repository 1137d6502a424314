"""The state of a worker, and the orders that it may obey: no IO, no clock, no tensor is touched here.

A worker serves one job at a time. Its layers outlive a generation: they are live at the boundary where the last run
stopped, until a Start names the layers that stay, or Release ends the job.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headway.daemon.jobs.job import JobSpec
from headway.daemon.storage.state_key import JOURNAL

LayerT = TypeVar("LayerT")
JournalT = TypeVar("JournalT")
TokensT = TypeVar("TokensT")

NO_GENERATION = 0
"""Generations are counted from 1."""


@dataclass
class OrderRefusedError(Exception):
    """The order does not fit the worker's state; the worker does not change."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True)
class WorkerSession(Generic[LayerT, JournalT, TokensT]):
    """One job's part on this worker. An empty `job` means that it serves none."""

    job: str = ""
    spec: JobSpec | None = None
    tokens: TokensT | None = None
    """Open data, on a worker that was prepared as the first stage."""
    prepared: int = NO_GENERATION
    """Newest generation that was prepared."""
    generation: int = NO_GENERATION
    """Generation in force here: that of the last Start."""
    timeline: int = NO_GENERATION
    """Timeline of the last Start, and of the live layers."""
    stage: int = 0
    """Stage of the last Start."""
    is_running: bool = False
    boundary: int | None = None
    """Boundary of the live layers; None while they are between boundaries."""
    layers: dict[str, LayerT] = field(default_factory=dict)
    journal: JournalT | None = None
    """Journal, on the last stage."""

    def admit_prepare(self, job: str, generation: int) -> None:
        """Admit a Prepare. Raises OrderRefusedError for another job than the served one, or a generation that
        is over.
        """
        if self.job and job != self.job:
            raise OrderRefusedError(f"job {job}: this worker serves job {self.job} until it is released")
        if self.job and generation <= self.generation:
            raise self._stale(generation)

    def did_prepare(self, job: str, generation: int, *, spec: JobSpec, tokens: TokensT | None) -> None:
        """Note a finished Prepare. Open data stays open."""
        self.job, self.spec = job, spec
        self.prepared = max(self.prepared, generation)
        self.tokens = tokens if tokens is not None else self.tokens

    def admit_start(self, job: str, generation: int) -> JobSpec:
        """Admit a Start; return the job's spec. Raises OrderRefusedError for a generation that is over or was never
        prepared.
        """
        self._admit_job(job)
        if generation <= self.generation:
            raise self._stale(generation)
        if generation > self.prepared or self.spec is None:
            raise OrderRefusedError(f"generation {generation} of job {job} was not prepared")
        return self.spec

    def admit_live(self, layers: Iterable[str], *, timeline: int, boundary: int) -> None:
        """Raise OrderRefusedError unless all of these are held, on this timeline and at this boundary."""
        for layer in layers:
            if layer == JOURNAL:
                self.live_journal(boundary)
            else:
                self.live_layer(layer, boundary)
            if timeline != self.timeline:
                raise OrderRefusedError(f"layer {layer} is held on timeline {self.timeline}, not on {timeline}")

    def keep(self, layers: Iterable[str]) -> None:
        """Drop all layers, and the journal, except these: a start is about to load the others."""
        kept = frozenset(layers)
        self.layers = {name: layer for name, layer in self.layers.items() if name in kept}
        self.journal = self.journal if JOURNAL in kept else None

    def live_layer(self, layer: str, boundary: int) -> LayerT:
        """Return a layer that is held at this boundary. Raises OrderRefusedError when it is not."""
        if layer not in self.layers:
            raise OrderRefusedError(f"layer {layer} is not held here")
        self.admit_boundary(boundary)
        return self.layers[layer]

    def live_journal(self, boundary: int) -> JournalT:
        """Return the journal that is held at this boundary. Raises OrderRefusedError when it is not."""
        if self.journal is None:
            raise OrderRefusedError("the journal is not held here")
        self.admit_boundary(boundary)
        return self.journal

    def admit_boundary(self, boundary: int) -> None:
        """Raise OrderRefusedError unless the live layers stand at this boundary."""
        if self.boundary != boundary:
            where = "between boundaries" if self.boundary is None else f"at boundary {self.boundary}"
            raise OrderRefusedError(f"the live layers are {where}, not at {boundary}")

    def did_start(
        self,
        generation: int,
        boundary: int,
        *,
        timeline: int,
        stage: int,
        layers: dict[str, LayerT],
        journal: JournalT | None,
    ) -> None:
        """Note a generation in force: its layers are held, all others are dropped."""
        self.generation, self.boundary = generation, boundary
        self.timeline, self.stage = timeline, stage
        self.layers, self.journal = layers, journal

    def did_run(self) -> None:
        """Note that the executor is about to change the layers."""
        self.is_running, self.boundary = True, None

    def did_stop(self, boundary: int | None) -> None:
        """Note that the executor has returned: at a boundary, or cut off between two."""
        self.is_running, self.boundary = False, boundary

    def admit(self, job: str, generation: int) -> None:
        """Admit an order about the generation in force. Raises OrderRefusedError for every other one."""
        self._admit_job(job)
        if generation < self.generation:
            raise self._stale(generation)
        if generation > self.generation:
            raise OrderRefusedError(f"generation {generation} of job {job} was not started")

    def admit_write(self, job: str, generation: int, boundary: int, *, layers: Iterable[str]) -> None:
        """Raise OrderRefusedError unless all parts to write are held at the boundary."""
        self.admit(job, generation)
        if self.is_running:
            raise OrderRefusedError(f"generation {generation} of job {job} is still running")
        for layer in layers:
            if layer == JOURNAL:
                self.live_journal(boundary)
            else:
                self.live_layer(layer, boundary)

    def release(self) -> None:
        """Drop everything of the job."""
        self.__init__()  # type: ignore[misc]

    def _admit_job(self, job: str) -> None:
        if job != self.job:
            raise OrderRefusedError(f"job {job} was not prepared here")

    def _stale(self, generation: int) -> OrderRefusedError:
        return OrderRefusedError(f"generation {generation} of job {self.job} is over; {self.generation} is in force")
