"""Parts that tests of worker share."""

from pathlib import Path

import torch

from headway.daemon.local.reference_loop import BatchResult, reference
from headway.daemon.worker.goal import WrittenFile
from headway.stages.data.tokens import TokenShards
from headway.stages.state.state_file import content_checksum, read_state
from tests.integration.worker.conftest import Case, Worker

ONE_STAGE = (("embed", "block.0", "block.1", "block.2", "head"),)


TWO_STAGES = (("embed", "block.0"), ("block.1", "block.2", "head"))


def assert_equals_reference(case: Case, worker: Worker, wrote: list[WrittenFile]) -> None:
    """Every batch's loss once, and every weight in the files, bit for bit those of the plain loop."""
    results: list[BatchResult] = []
    weights = reference(case.spec, TokenShards.open(case.data), on_batch=results.append)
    assert [(done.batch, done.loss) for _, done in worker.done] == [(row.batch, row.loss) for row in results]
    files = {file.layer: file for file in wrote}
    assert files.keys() == {*case.spec.layers, "journal"}
    for file in files.values():
        path = Path(file.path)
        assert (path.stat().st_size, content_checksum(path)) == (file.size_bytes, file.checksum)
    for layer, expected in weights.items():
        _, tensors = read_state(Path(files[layer].path))
        for name, tensor in expected.items():
            assert torch.equal(tensors[f"current/{name}"], tensor), f"{layer}/{name}"
