"""Computes each worker's share of every batch: its stage, and its reduction groups' microbatches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of all workers of a plan, by position."""

    stage_of: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    """Positions of the workers, by stage."""
    microbatches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[str, ...]],
        groups: Sequence[tuple[int, ...]],
        *,
        num_microbatches: int,
        num_groups: int,
    ) -> "Shares":
        """Return the shares. layers, groups: by worker. Neighbours with equal layers are replicas; no groups: all of
        them.
        """
        stage_of: list[int] = []
        for worker, own in enumerate(layers):
            is_replica = worker > 0 and own == layers[worker - 1]
            stage_of.append(stage_of[-1] + (not is_replica) if stage_of else 0)
        num_stages = stage_of[-1] + 1 if stage_of else 0
        replicas = tuple(
            tuple(worker for worker, stage in enumerate(stage_of) if stage == index) for index in range(num_stages)
        )
        held = [(groups[worker] if worker < len(groups) else ()) or range(num_groups) for worker in range(len(layers))]
        microbatches = tuple(tuple(i for i in range(num_microbatches) if i % num_groups in own) for own in held)
        return cls(tuple(stage_of), replicas, microbatches)

    def siblings(self, worker: int) -> tuple[int, ...]:
        """Return the other replicas of a worker's stage."""
        return tuple(other for other in self.replicas[self.stage_of[worker]] if other != worker)

    def worker_of(self, stage: int, microbatch: int) -> int | None:
        """Return the worker that computes a microbatch on a stage; None: no worker does, or the stage does
        not exist.
        """
        workers = self.replicas[stage] if 0 <= stage < len(self.replicas) else ()
        return next((worker for worker in workers if microbatch in self.microbatches[worker]), None)

    def name(self, worker: int) -> str:
        """Return `stage 1`, or `stage 1 (replica 2 of 2)`."""
        if not 0 <= worker < len(self.stage_of):
            return f"worker {worker}"
        beside = self.replicas[self.stage_of[worker]]
        note = f" (replica {beside.index(worker) + 1} of {len(beside)})" if len(beside) > 1 else ""
        return f"stage {self.stage_of[worker]}{note}"
