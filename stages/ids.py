"""Names for the integers and strings that everything else counts and calls by."""

from typing import NewType

StageIndex = NewType("StageIndex", int)
"""Position of a stage in the pipeline; 0 holds `embed`."""

Generation = NewType("Generation", int)
"""Number of the plan in force; strictly rising within a job, on every message."""

Timeline = NewType("Timeline", int)
"""The generation that began with the last rollback."""

Batch = NewType("Batch", int)
"""One optimizer step's worth of microbatches, counted from 0."""

MicrobatchIndex = NewType("MicrobatchIndex", int)
"""Position inside a batch, 0 … m-1."""

Boundary = NewType("Boundary", int)
"""Boundary b: the content of the state after update(b-1) and before update(b)."""

LayerName = NewType("LayerName", str)
"""`embed`, `block.0` …, `head`: the unit of state and migration."""
