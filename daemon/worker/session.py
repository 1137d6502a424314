"""The state of a worker, and which orders it may execute. It does no IO, reads no clock and touches no tensor.

A worker serves one job at a time. Its layers outlive a generation: they stay live at the boundary where the last run
stopped, until a Start names the layers to keep, or Release ends the job.
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
    """One job's part on this worker. An empty `job` means that the worker serves none."""

    job: str = ""
    spec: JobSpec | None = None
    tokens: TokensT | None = None
    """The open data, on a worker that was prepared as the first stage."""
    prepared: int = NO_GENERATION
    """Newest generation that was prepared."""
    generation: int = NO_GENERATION
    """Generation of the last Start."""
    timeline: int = NO_GENERATION
    """Timeline of the last Start and of the live layers."""
    stage: int = 0
    """Stage of the last Start."""
    is_running: bool = False
    boundary: int | None = None
    """Boundary of the live layers; None while they are between boundaries."""
    best_batch: int | None = None
    """Batch of the best evaluation, if evaluations end the job at `boundary`."""
    layers: dict[str, LayerT] = field(default_factory=dict)
    journal: JournalT | None = None
    """The journal, on the last stage."""

    def admit_prepare(self, job: str, generation: int) -> None:
        """Admit a Prepare. Raises OrderRefusedError if the worker serves another job, or the generation has ended."""
        if self.job and job != self.job:
            raise OrderRefusedError(f"job {job}: this worker serves job {self.job} until it is released")
        if self.job and generation <= self.generation:
            raise self._stale(generation)

    def did_prepare(self, job: str, generation: int, *, spec: JobSpec, tokens: TokensT | None) -> None:
        """Record a finished Prepare. Open data stays open."""
        self.job, self.spec = job, spec
        self.prepared = max(self.prepared, generation)
        self.tokens = tokens if tokens is not None else self.tokens

    def admit_start(self, job: str, generation: int) -> JobSpec:
        """Admit a Start; return the job's spec. Raises OrderRefusedError if the generation has ended or was never
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
        """Drop all layers and the journal, except these, before a start loads the others."""
        kept = frozenset(layers)
        self.layers = {name: layer for name, layer in self.layers.items() if name in kept}
        self.journal = self.journal if JOURNAL in kept else None

    def live_layer(self, layer: str, boundary: int) -> LayerT:
        """Return a layer held at this boundary. Raises OrderRefusedError if it is not held."""
        if layer not in self.layers:
            raise OrderRefusedError(f"layer {layer} is not held here")
        self.admit_boundary(boundary)
        return self.layers[layer]

    def live_journal(self, boundary: int) -> JournalT:
        """Return the journal held at this boundary. Raises OrderRefusedError if it is not held."""
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
        """Record that a generation has started: its layers are held, all others were dropped."""
        self.generation, self.boundary, self.best_batch = generation, boundary, None
        self.timeline, self.stage = timeline, stage
        self.layers, self.journal = layers, journal

    def did_run(self) -> None:
        """Record that the executor is about to change the layers."""
        self.is_running, self.boundary = True, None

    def did_stop(self, boundary: int | None, *, best_batch: int | None = None) -> None:
        """Record that the executor has returned: at a boundary, or interrupted between two.

        best_batch: of the evaluations that end the job at this boundary.
        """
        self.is_running, self.boundary, self.best_batch = False, boundary, best_batch

    def admit(self, job: str, generation: int) -> None:
        """Admit an order about the generation of the last Start. Raises OrderRefusedError for any other generation."""
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
        return OrderRefusedError(
            f"generation {generation} of job {self.job} has ended; the worker runs {self.generation}"
        )
