"""What every device keeps to: the CPU and the test device that is late by seed; tests/gpu adds CUDA."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from headway.stages.device.device import StageDevice
from headway.stages.device.opening import open_device
from tests.rigs.late_streams import late_device

PATIENCE_S = 20.0
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8)


@pytest.fixture(params=["cpu", *(f"late {seed}" for seed in range(4))])
def device(request: pytest.FixtureRequest) -> Iterator[StageDevice]:
    """A device of each kind; no error in its threads goes unheard. tests/gpu has the one for CUDA."""
    failures: list[BaseException] = []
    kind, _, seed = request.param.partition(" ")
    opened: StageDevice
    if kind == "late":
        opened = late_device(int(seed), on_failure=failures.append)
    else:
        opened = open_device(torch.device(kind), on_failure=failures.append)
    yield opened
    opened.close()
    assert failures == []


def values(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5), *, first: int = 1) -> Tensor:
    """Small numbers that every type can hold, different in each place."""
    return torch.arange(first, first + torch.Size(shape).numel()).to(dtype).view(shape)


def on_device(device: StageDevice, tensor: Tensor) -> Tensor:
    """What a computation on the device has made."""
    return tensor.to(device.torch_device) + 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_to_the_host_has_the_bits_of_its_source(device: StageDevice, dtype: torch.dtype) -> None:
    """Tensors of each type, one without elements and one without dimensions → equal ones in host memory."""
    sources = [values(dtype), values(dtype, ()), values(dtype, (0, 4)), values(dtype, (4, 3)).t()]
    copied = device.copy_out([on_device(device, source) for source in sources]).wait(PATIENCE_S)
    assert [tensor.dtype for tensor in copied] == [dtype] * 4
    assert all(tensor.is_cpu for tensor in copied)
    assert all(torch.equal(tensor, source) for tensor, source in zip(copied, sources, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_taken_on_the_device_is_complete(device: StageDevice, dtype: torch.dtype) -> None:
    """A copy is taken at once → the computation reads what was given, although the host waited for nothing."""
    sources = [values(dtype), values(dtype, ()), values(dtype, (0, 4))]
    taken = device.copy_in(sources).take()
    computed = [tensor + 1 for tensor in taken]
    for tensor, source in zip(device.copy_out(computed).wait(PATIENCE_S), sources, strict=True):
        assert torch.equal(tensor, source + 1)


def test_many_copies_both_ways_at_once_do_not_mix(device: StageDevice) -> None:
    """Copies in and out under way together, taken and heard in another order → each has its own bits."""
    arriving = [device.copy_in([values(torch.float32, (64,), first=k)]) for k in range(20)]
    leaving = [device.copy_out([on_device(device, values(torch.int64, (64,), first=k))]) for k in range(20)]
    doubled = [device.copy_out([copy.take()[0] * 2]) for copy in reversed(arriving)]
    for k, copy in enumerate(leaving):
        assert torch.equal(copy.wait(PATIENCE_S)[0], values(torch.int64, (64,), first=k))
    for k, copy in enumerate(reversed(doubled)):
        assert torch.equal(copy.wait(PATIENCE_S)[0], 2 * values(torch.float32, (64,), first=k))


def test_the_memory_of_a_copy_is_free_only_after_it(device: StageDevice) -> None:
    """Sources and copies are dropped at once, over and over → no later copy sees another's bits."""
    for k in range(50):
        source = values(torch.float32, (256,), first=k)
        taken = device.copy_in([source.clone()]).take()[0]
        copy = device.copy_out([taken + 1])
        del taken
        device.copy_out([on_device(device, torch.full((256,), -7.0))])
        assert torch.equal(copy.wait(PATIENCE_S)[0], source + 1), k


def test_given_buffers_are_filled(device: StageDevice) -> None:
    """A bulk copy into buffers of the caller → they have the bits, twice over."""
    buffers = [device.host_buffer(torch.float32, (7,)), device.host_buffer(torch.int64, ())]
    for k in (1, 50):
        sources = [values(torch.float32, (7,), first=k), values(torch.int64, (), first=k)]
        moved = [on_device(device, source) for source in sources]
        copied = device.copy_out(moved, into=buffers, is_bulk=True).wait(PATIENCE_S)
        assert [tensor.data_ptr() for tensor in copied] == [buffer.data_ptr() for buffer in buffers]
        assert all(torch.equal(tensor, source) for tensor, source in zip(copied, sources, strict=True))


def test_a_buffer_of_the_host_is_copied_without_another_copy(device: StageDevice) -> None:
    """A source in a `host_buffer`, dropped by the caller before the copy is done → the right bits on the device."""
    buffer = device.host_buffer(torch.float32, (128,))
    buffer.copy_(values(torch.float32, (128,)))
    copy = device.copy_in([buffer])
    del buffer
    others = [device.host_buffer(torch.float32, (128,)).fill_(-1) for _ in range(3)]
    assert torch.equal(device.copy_out([copy.take()[0] + 0]).wait(PATIENCE_S)[0], values(torch.float32, (128,)))
    assert len(others) == 3


def test_acts_come_in_the_order_of_their_calls_and_after_their_moments(device: StageDevice) -> None:
    """Ten copies and ten marks → in each line the acts in order, each when its moment is done."""
    heard: SimpleQueue[tuple[str, int, bool]] = SimpleQueue()
    for k in range(10):
        copy = device.copy_out([on_device(device, values(torch.float32, first=k))])
        mark = device.mark()
        device.after(copy, lambda copy=copy, k=k: heard.put(("copy", k, copy.is_done)))  # type: ignore[misc]
        device.after(mark, lambda mark=mark, k=k: heard.put(("mark", k, mark.is_done)))  # type: ignore[misc]
    said = [heard.get(timeout=PATIENCE_S) for _ in range(20)]
    for line in ("copy", "mark"):
        assert [(k, is_done) for what, k, is_done in said if what == line] == [(k, True) for k in range(10)]


def test_marks_tell_the_time_between_them(device: StageDevice) -> None:
    """Two marks with work between them → done within the deadline, and the time between is not negative."""
    first = device.mark()
    product = on_device(device, torch.ones(64, 64)) @ on_device(device, torch.ones(64, 64))
    second = device.mark()
    second.wait(PATIENCE_S)
    assert first.is_done
    assert second.is_done
    assert 0 <= second.seconds_since(first) < PATIENCE_S
    assert product.shape == (64, 64)


def test_copies_to_the_device_may_begin_in_another_thread(device: StageDevice) -> None:
    """A thread that draws tokens begins their copies → the thread that computes takes them."""
    copies: SimpleQueue[object] = SimpleQueue()
    thread = threading.Thread(target=lambda: copies.put(device.copy_in([values(torch.int64)])))
    thread.start()
    copy = copies.get(timeout=PATIENCE_S)
    thread.join()
    assert torch.equal(device.copy_out([copy.take()[0] + 1]).wait(PATIENCE_S)[0], values(torch.int64) + 1)  # type: ignore[attr-defined]


def test_a_closed_device_drops_what_is_not_due(device: StageDevice) -> None:
    """Closed twice → no error; its threads end."""
    device.after(device.mark(), lambda: None)
    device.close()
    device.close()
