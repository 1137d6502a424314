"""The probes of `make gpu` in their order: a command, its time limit, and the rows that its figures fill. Pure.

A probe prints one JSON object last. Each one takes `--device cpu` too, on sizes that a small machine can do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One command."""

    name: str
    arguments: tuple[str, ...]
    """After the interpreter; `--device KIND` follows."""
    limit_s: float
    rows: tuple[Row, ...]


PROBES: Final = (
    Probe(
        name="tests",
        arguments=("-m", "gpu.card_tests"),
        limit_s=420.0,
        rows=(
            Row(name="tests/gpu: tests that failed", key="num_failed", most=0),
            Row(name="exact, float32, 1 worker", key="exact_float32_1", least=1),
            Row(name="exact, bfloat16, 1 worker", key="exact_bfloat16_1", least=1),
            Row(name="exact, float32, 2 workers on one card", key="exact_float32_2", least=1),
            Row(name="exact, bfloat16, 2 workers on one card", key="exact_bfloat16_2", least=1),
        ),
    ),
    Probe(
        name="first",
        arguments=("-m", "gpu.first_operations"),
        limit_s=240.0,
        rows=(
            Row(name="first allocation and context", key="context_s", unit="s"),
            Row(name="first products: cuBLAS", key="products_s", unit="s"),
            Row(name="first forward and backward of a block", key="block_s", unit="s"),
            Row(name="first Newton–Schulz of a block", key="newton_schulz_s", unit="s"),
            Row(name="first compilation of a block", key="compile_s", unit="s"),
            Row(name="first operations over the time that liveness gives", key="share_of_limit", most=0.5),
        ),
    ),
    Probe(
        name="idle",
        arguments=("-m", "gpu.idle_share"),
        limit_s=240.0,
        rows=tuple(
            Row(name=f"compute stream idle for a link or a copy, {place} stage", key=f"idle_share_{place}", most=0.02)
            for place in ("first", "middle", "last")
        ),
    ),
    Probe(
        name="memory",
        arguments=("-m", "gpu.memory"),
        limit_s=240.0,
        rows=(
            Row(name="memory: workers predicted wrong by a tenth", key="num_missed", most=0),
            Row(name="memory, predicted over measured: least", key="predicted_vs_measured_least"),
            Row(name="memory, predicted over measured: most, replicas too", key="predicted_vs_measured_most"),
        ),
    ),
    Probe(
        name="stages",
        arguments=("-m", "gpu.stages"),
        limit_s=300.0,
        rows=(
            Row(name="one stage over the plain loop, tokens/s", key="one_stage_ratio", least=0.97),
            Row(name="one stage, share of the card's matrix products", key="one_stage_mfu"),
            Row(name="two stages on one card, share of the same", key="two_stages_mfu"),
            Row(name="two stages over one, on one card, tokens/s", key="two_stages_over_one"),
        ),
    ),
    Probe(
        name="snapshots",
        arguments=("-m", "gpu.snapshots"),
        limit_s=180.0,
        rows=(
            Row(name="tokens/s with snapshots over without", key="snapshot_ratio", least=0.97),
            Row(name="longest batch with a snapshot over the median", key="snapshot_stall", most=1.5),
        ),
    ),
    Probe(
        name="links",
        arguments=("-m", "gpu.links"),
        limit_s=180.0,
        rows=(
            *(
                Row(name=f"{link}, tensors on cards, frames of {size}", key=f"{link}_mb_s_{size}", unit="MB/s")
                for link in ("grpc", "collective")
                for size in ("1MiB", "16MiB")
            ),
            Row(name="gRPC link on cards over host tensors", key="grpc_device_vs_host"),
        ),
    ),
    Probe(
        name="recovery",
        arguments=("bench/recovery.py", "--quick"),
        limit_s=240.0,
        rows=(
            Row(name="kill of a worker to its successor's first work", key="worker_resume_p50_s", most=1.5, unit="s"),
            Row(name="kill to new ground", key="new_batch_p50_s", most=3.0, unit="s"),
            Row(name="planned change: batches computed again", key="planned_recomputed_max", most=0),
        ),
    ),
    Probe(
        name="demo",
        arguments=("-m", "gpu.demo"),
        limit_s=300.0,
        rows=(
            Row(name="headway demo: exit status", key="exit_status", most=0),
            Row(name="headway demo: seconds", key="seconds", unit="s"),
        ),
    ),
)


def chosen(names: Sequence[str]) -> tuple[Probe, ...]:
    """Return the probes of these names, in their order; all if none is named."""
    return tuple(probe for probe in PROBES if not names or probe.name in names)
