"""Says in one sentence which arithmetic a job computes with: dtypes, kernels, what is deterministic. Pure."""

from headway.daemon.jobs.job import JobSpec


def arithmetic_settings(spec: JobSpec) -> str:
    """Return the sentence, from the job's record alone: what was left open is decided there."""
    train, matrices = spec.train, spec.optim.matrices
    masters = " with float32 masters" if train.dtype == "bfloat16" else ""
    parts = [f"computes in {train.dtype}{masters}"]
    if matrices.name == "muon":
        parts.append(f"Newton–Schulz in {matrices.newton_schulz_dtype}")
    if (narrow := _narrow_state(spec)) != "":
        parts.append(f"{narrow} kept in bfloat16")
    parts.append(f"attention by {_kernel(train.attention_backend)}")
    if train.loss_chunk:
        parts.append(f"logits of {train.loss_chunk} tokens at once")
    if train.compile:
        parts.append("compiled layers")
    parts += [f"TF32 {'on' if train.allow_tf32 else 'off'}", _threads(train.threads)]
    return f"{', '.join(parts)}; all algorithms are deterministic"


def _kernel(backend: str) -> str:
    return "the kernel that torch chooses" if backend == "auto" else backend


def _narrow_state(spec: JobSpec) -> str:
    """Return which parts of the optimizers' state wait in bfloat16."""
    narrow = []
    if any(group.momentum_dtype == "bfloat16" for group in (spec.optim.matrices, spec.optim.rest)):
        narrow.append("momentum")
    if spec.optim.error_feedback_dtype == "bfloat16" and spec.optim.error_feedback * spec.train.delay > 0:
        narrow.append("error feedback")
    return " and ".join(narrow)


def _threads(number: int) -> str:
    return "1 thread per worker" if number == 1 else f"{number} threads per worker"
