"""Memory for tensors that arrive."""

import platform

import pytest
import torch

from headway.stages.device.cpu import CpuDevice
from headway.stages.links.frame_contract import ALIGNMENT_BYTES
from headway.stages.links.receive_buffers import bytes_for, empty_bytes
from tests.rigs.late_streams import late_device


@pytest.mark.parametrize("num_bytes", [0, 1, 35, 64 * 1025])
def test_a_payload_is_aligned(num_bytes: int) -> None:
    """At a multiple of the alignment, and all of it writable."""
    payloads = [torch.from_numpy(empty_bytes(num_bytes)) for _ in range(3)]
    for number, payload in enumerate(payloads):
        assert payload.shape == (num_bytes,)
        assert num_bytes == 0 or payload.data_ptr() % ALIGNMENT_BYTES == 0
        payload.fill_(number)
    assert all(bool((payload == number).all()) for number, payload in enumerate(payloads))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other allocators")
def test_a_freed_block_is_found_again() -> None:
    """One between two others of its size is freed: the next of its size lies where it lay."""
    num_bytes = 100_123
    # Most of them fill the gaps that earlier tests have left.
    blocks = [torch.from_numpy(empty_bytes(num_bytes)) for _ in range(200)]
    place = blocks[-2].data_ptr()
    del blocks[-2]
    again = torch.from_numpy(empty_bytes(num_bytes))
    assert again.data_ptr() == place
    assert all(block.data_ptr() != place for block in blocks)


def test_a_device_with_streams_gets_payloads_that_it_copies_from() -> None:
    """A payload for a device with streams, and a tensor at its beginning → in memory of the device's own kind."""
    device = late_device(1)
    payload = bytes_for(device)(256)
    assert payload.nbytes == 256
    assert device.streams.is_host_buffer(torch.from_numpy(payload).view(torch.float32))
    assert bytes_for(CpuDevice()) is empty_bytes
