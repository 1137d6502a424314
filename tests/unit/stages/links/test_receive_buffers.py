"""Memory for tensors that arrive."""

import platform

import pytest
import torch

from headway.stages.device.cpu import CpuDevice
from headway.stages.links.frame_contract import ALIGNMENT_BYTES
from headway.stages.links.receive_buffers import bytes_for, empty_bytes, empty_tensor
from tests.rigs.late_streams import late_device


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 7), (64, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_a_tensor_is_of_its_form_and_aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any type and shape, also without elements: contiguous, at a multiple of the alignment, and all of it writable."""
    tensors = [empty_tensor(dtype, shape) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other allocators")
def test_a_freed_block_is_found_again() -> None:
    """One between two others of its size is freed: the next of its size lies where it lay."""
    shape = (100_123,)
    # Most of them fill the gaps that earlier tests have left.
    blocks = [empty_tensor(torch.uint8, shape) for _ in range(200)]
    place = blocks[-2].data_ptr()
    del blocks[-2]
    again = empty_tensor(torch.uint8, shape)
    assert again.data_ptr() == place
    assert all(block.data_ptr() != place for block in blocks)


def test_a_device_with_streams_gets_payloads_that_it_copies_from() -> None:
    """A payload for a device with streams, and a tensor at its beginning → in memory of the device's own kind."""
    device = late_device(1)
    payload = bytes_for(device)(256)
    assert payload.nbytes == 256
    assert device.streams.is_host_buffer(torch.from_numpy(payload).view(torch.float32))
    assert bytes_for(CpuDevice()) is empty_bytes
