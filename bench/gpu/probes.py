"""The probes of `make gpu` in their order: a command, its time limit, and the rows that its figures fill. Pure.

A probe prints one JSON object last. Each one takes `--device cpu` too, on sizes that a small machine can do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu.rows import Row
from headway.stages.attention_kernels import FASTEST_FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One command."""

    name: str
    arguments: tuple[str, ...]
    """After the interpreter; `--device KIND` follows."""
    on_cpu: tuple[str, ...] = ()
    """Arguments that follow on a CPU, where all is smaller."""
    limit_s: float
    rows: tuple[Row, ...]


def own(module: str) -> tuple[str, ...]:
    """Return the arguments of a probe of this folder."""
    return "-m", "gpu.probe", module


PROBES: Final = (
    Probe(
        name="tests",
        arguments=own("card_tests"),
        limit_s=420.0,
        rows=(
            Row(name="tests/gpu: tests that failed", key="num_failed", most=0, is_general=True),
            Row(name="exact, float32, 1 worker", key="exact_float32_1", least=1, is_general=True),
            Row(name="exact, bfloat16, 1 worker", key="exact_bfloat16_1", least=1, is_general=True),
            Row(name="exact, float32, 2 workers on one card", key="exact_float32_2", least=1, is_general=True),
            Row(name="exact, bfloat16, 2 workers on one card", key="exact_bfloat16_2", least=1, is_general=True),
        ),
    ),
    Probe(
        name="first",
        arguments=own("first_operations"),
        limit_s=240.0,
        rows=(
            Row(name="first compilation of a block", key="compile_s", unit="s"),
            Row(name="first operations over the time that liveness gives", key="share_of_limit", most=0.5),
        ),
    ),
    Probe(
        name="kernels",
        arguments=own("kernels"),
        limit_s=120.0,
        rows=(
            Row(name="a microbatch", key="microbatch_s", unit="s"),
            Row(name="a microbatch: time in which a kernel runs", key="microbatch_busy"),
            Row(name="a microbatch: matrix products, of the kernels' time", key="microbatch_products"),
            Row(name="a microbatch: attention, of the kernels' time", key="microbatch_attention"),
            Row(name="an update, of a batch", key="update_share"),
            Row(name="an update: matrix products, of the kernels' time", key="update_products"),
        ),
    ),
    Probe(
        name="sweeps",
        arguments=own("sweeps"),
        limit_s=240.0,
        rows=(
            *(
                Row(name=f"a microbatch, tokens/s with {value} over the job as submitted", key=f"{key}_{value}")
                for key, values in (("dtype", ("float32", "bfloat16")), ("attention", FASTEST_FIRST))
                for value in values
            ),
            Row(name="the same, compiled blocks over plain ones", key="compile"),
            Row(name="the head, loss in chunks of few rows over all at once", key="loss_chunk_small"),
            Row(name="the head, loss in chunks of more rows", key="loss_chunk_large"),
            Row(name="variants with other bits the second time", key="num_unrepeatable", most=0, is_general=True),
            Row(
                name="compiled blocks: other bits in another process",
                key="compile_other_bits",
                most=0,
                is_general=True,
            ),
        ),
    ),
    Probe(
        name="idle",
        arguments=own("idle_share"),
        limit_s=180.0,
        rows=tuple(
            Row(name=f"{place} stage, time in which a kernel runs, over that without links", key=key, least=0.98)
            for place in ("first", "middle", "last")
            for key in (f"busy_{place}_vs_alone",)
        ),
    ),
    Probe(
        name="memory",
        arguments=own("memory"),
        limit_s=240.0,
        rows=(
            Row(name="memory: workers predicted wrong by a tenth", key="num_missed", most=0, is_general=True),
            Row(name="memory, predicted over measured: least", key="predicted_vs_measured_least"),
            Row(name="memory, predicted over measured: most, replicas too", key="predicted_vs_measured_most"),
        ),
    ),
    Probe(
        name="stages",
        arguments=own("stages"),
        limit_s=300.0,
        rows=(
            Row(name="one stage over the plain loop, tokens/s", key="one_stage_ratio", least=0.97),
            Row(name="one stage, share of the card's matrix products", key="one_stage_mfu", least=0.4),
            Row(name="two stages over one, on one card, tokens/s", key="two_stages_over_one"),
        ),
    ),
    Probe(
        name="snapshots",
        arguments=own("snapshots"),
        limit_s=180.0,
        rows=(
            Row(name="tokens/s with snapshots over without", key="snapshot_ratio", least=0.97),
            Row(name="longest batch with a snapshot over the median", key="snapshot_stall", most=1.5),
        ),
    ),
    Probe(
        name="links",
        arguments=own("links"),
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
        name="peers",
        arguments=own("peers"),
        limit_s=60.0,
        rows=(
            Row(name="copies between a card and the host, the slowest way", key="host_gb_s_least", unit="GB/s"),
            Row(name="copies between two cards, the slowest way", key="peer_gb_s_least", unit="GB/s"),
        ),
    ),
    Probe(
        name="pairs",
        arguments=own("pairs"),
        limit_s=240.0,
        rows=(
            Row(name="a product beside frames both ways, over one without", key="compute_slowdown", most=1.02),
            *(
                Row(name=f"{size} workers, every two exchange: each takes", key=f"pairs_{size}_gb_s", unit="GB/s")
                for size in (2, 4, 8)
            ),
        ),
    ),
    Probe(
        name="cards",
        arguments=own("cards"),
        limit_s=420.0,
        rows=(
            Row(name="several cards: runs with other losses than one", key="num_other_losses", most=0, is_general=True),
            *(
                Row(
                    name=f"{number} cards as {name}, tokens/s of each over one",
                    key=f"{name}_{number}",
                    least=0.92,
                )
                for name in ("stages", "replicas")
                for number in (2, 4, 8)
            ),
        ),
    ),
    Probe(
        name="real",
        arguments=own("real_size"),
        limit_s=600.0,
        rows=(
            Row(name="8B at 8k on all cards", key="tokens_s", unit="tokens/s"),
            Row(name="8B at 8k, share of the cards' matrix products", key="mfu"),
            Row(name="8B at 8k, planned over allocated memory: least", key="memory_least", least=0.9),
            Row(name="8B at 8k, planned over allocated memory: most", key="memory_most", most=1.1),
        ),
    ),
    Probe(
        name="recovery",
        arguments=("bench/recovery.py", "--quick", "--stops", "2"),
        on_cpu=("--layer-s", "0.004"),
        limit_s=300.0,
        rows=(
            Row(name="kill of a worker to its successor's first work", key="worker_resume_p50_s", most=1.5, unit="s"),
            Row(name="SIGSTOP of a worker to the same", key="stopped_resume_p50_s", most=10.0, unit="s"),
            Row(name="kill to new ground", key="new_batch_p50_s", most=3.0, unit="s"),
            Row(name="planned change: longest pause", key="planned_pause_s", most=1.0, unit="s"),
            Row(name="planned change: batches again", key="planned_recomputed_max", most=0, is_general=True),
        ),
    ),
    Probe(
        name="demo",
        arguments=own("demo"),
        limit_s=300.0,
        rows=(
            Row(name="headway demo: exit status", key="exit_status", most=0, is_general=True),
            Row(name="headway demo: seconds", key="seconds", unit="s"),
        ),
    ),
    Probe(
        name="soak",
        arguments=("-m", "tests.chaos.soak", "--minutes", "30", "--jobs", "100"),
        on_cpu=("--jobs", "1"),
        limit_s=2400.0,
        rows=(
            Row(name="half an hour of faults: faults", key="faults"),
            Row(name="half an hour of faults: jobs with other bits", key="divergences", most=0, is_general=True),
            Row(name="half an hour of faults: jobs with any trouble", key="num_failing", most=0, is_general=True),
            Row(name="half an hour of faults: worst recovery", key="worst_recovery_s", unit="s"),
        ),
    ),
)


def chosen(names: Sequence[str]) -> tuple[Probe, ...]:
    """Return the probes of these names, in their order; all if none is named."""
    return tuple(probe for probe in PROBES if not names or probe.name in names)
