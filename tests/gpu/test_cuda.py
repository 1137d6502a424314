"""The promise on a CUDA device: stages through daemons and workers against the plain loop on the same card."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.node.hardware import find_devices
from tests.integration.exactness.training import Oracle, assert_same_bits, small_job, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_workers_on_a_card_give_the_bits_of_the_plain_loop_there(
    tmp_path: Path, kind: Literal["cpu", "cuda"], dtype: str, workers: int
) -> None:
    """The job ends with the losses and weights of the reference on that card. Two workers share it, over gRPC."""
    auto = small_job(f"card-{dtype}-{workers}", dtype=dtype)
    auto = replace(auto, train=replace(auto.train, attention_backend="auto"))
    # The card itself decides about the kernel: its capability is part of that.
    spec = resolve_job(auto, job_file=Path("job.toml"), devices=find_devices(kind, 0), cache_dir=default_cache_dir())
    settings: dict[str, object] = {"devices": kind}
    async with LocalCluster(tmp_path / "state", num_nodes=workers, node_settings=settings) as cluster:
        result = await train(cluster, spec, tmp_path / "out", num_nodes=workers)
    assert_same_bits(result, Oracle(tmp_path / "oracle", device=kind)(spec))


CONTEXTS = """
import threading, torch
from headway.stages.device.opening import CudaStreams
from headway.stages.device.streamed import StreamedDevice
card = torch.device("cuda", 1)
torch.cuda.set_device(card)
device = StreamedDevice(CudaStreams(card), on_failure=lambda error: None)
done = threading.Event()
device.after(device.copy_out([torch.ones(8, device=card)]), done.set)
assert done.wait(60)
thread = threading.Thread(target=lambda: device.copy_in([torch.ones(8)]))
thread.start()
thread.join()
print([torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)])
"""


def test_the_threads_of_a_worker_make_no_context_on_another_card() -> None:
    """A worker of card 1 copies in threads → card 0 has no context of its process, which would take half a GB."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has no second card")
    done = subprocess.run([sys.executable, "-c", CONTEXTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[False, True]", done.stderr
