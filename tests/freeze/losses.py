"""The losses and last weights of small jobs, by the reference loop and by pipelines of one stage a layer."""

import hashlib
import tempfile
from pathlib import Path

import torch

from tests.unit.second_oracle.comparison import Bits, by_pipeline, by_reference
from tests.unit.second_oracle.conftest import written, written_by_hand
from tests.unit.second_oracle.jobs import CODED_CUTS, CUT, JOBS, job_file

PIPELINES = (
    *CUT,
    "1f1b, AdamW",
    "gpipe, AdamW",
    "tied, bfloat16, chunks",
    "preferences",
    "dropout",
    "Mixtral",
    "adapters beside NF4",
    "Qwen3.5, separate documents, bfloat16",
)


def record() -> dict[str, str]:
    """Every job of the two oracles, some of them cut everywhere, and rows packed or of two sources."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = written_by_hand(Path(folder, "data"))
        packed = written(Path(folder, "packed"), seed=1, row_tokens=13)
        found = {name: _digest(by_reference(text, data, coded_cuts=CODED_CUTS)) for name, text in JOBS.items()}
        for name in PIPELINES:
            found[f"{name}, four stages"] = _digest(by_pipeline(JOBS[name], data, num_stages=4))
        epochs = job_file('loss_mask = "data"\ndata_order = "epochs"', batches=12)
        found["packed rows in epochs"] = _digest(by_reference(epochs, packed))
    return found


def _digest(bits: Bits) -> str:
    losses, weights = bits
    told = tuple(row if row[-1] is not None else row[:-1] for row in losses)  # the last one alone has a held-out end
    digest = hashlib.sha256(repr(told).encode())
    for name, content in weights:
        digest.update(name.encode() + content)
    return digest.hexdigest()
