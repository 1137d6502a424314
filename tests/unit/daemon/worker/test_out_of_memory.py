"""What a worker reports when its device has no memory left."""

import pytest
import torch

from headway.daemon.base.fault_points import InjectedFaultError
from headway.daemon.cluster.measurements import MemoryShortage
from headway.daemon.worker.out_of_memory import fault_line, refusals_of_libraries, shortage_of

GIB = 1 << 30
SHARED = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 MiB is "
    "free. Process 12 has 79.09 GiB memory in use. 39.50 GiB allowed; Of the allocated memory 38.00 GiB is "
    "allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 512 bytes is "
    "reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SHARED, MemoryShortage(wanted_bytes=20 << 20, allocated_bytes=38 * GIB, allowed_bytes=79 * GIB // 2)),
        (
            SHARED.replace("39.50 GiB allowed; ", "").replace("79.10", "80.00"),
            MemoryShortage(wanted_bytes=20 << 20, allocated_bytes=38 * GIB, allowed_bytes=80 * GIB),
        ),
        ("CUDA out of memory. Tried to allocate 512 bytes.", MemoryShortage(wanted_bytes=512)),
        ("Allocation on device", MemoryShortage()),
    ],
)
def test_sizes_are_read_from_the_error(text: str, expected: MemoryShortage) -> None:
    """A node's part of a shared card is its limit; what torch does not say is 0."""
    assert shortage_of(torch.OutOfMemoryError(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    ],
)
def test_a_librarys_refusal_is_one_too(text: str) -> None:
    """cuBLAS, cuDNN and the driver allocate beside torch, and raise a RuntimeError → torch's error, with the words."""
    with pytest.raises(torch.OutOfMemoryError) as caught, refusals_of_libraries():
        raise RuntimeError(text)
    assert str(caught.value) == text
    assert shortage_of(caught.value) == MemoryShortage()


@pytest.mark.parametrize("text", ["CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "CUDA error: an illegal memory access"])
def test_other_errors_stay_what_they_are(text: str) -> None:
    """A broken kernel is no shortage: less on the device would not help. A shortage of torch's own passes unchanged."""
    with pytest.raises(RuntimeError, match=text) as caught, refusals_of_libraries():
        raise RuntimeError(text)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    own = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes.")
    with pytest.raises(torch.OutOfMemoryError) as again, refusals_of_libraries():
        raise own
    assert again.value is own


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RuntimeError("CUDA error at 0x7f3a\nCompile with more"), RuntimeError("CUDA error at 0xdead\nor without")),
        (IndexError("index 63 is out of bounds for 8"), IndexError("index 9 is out of bounds for 8")),
        (MemoryError("tried 2.50 GiB on cuda:0"), MemoryError("tried 12.1 GiB on cuda:1")),
    ],
)
def test_the_same_error_in_two_processes_gives_one_line(one: Exception, other: Exception) -> None:
    """Addresses, amounts, indices and later lines differ → the lines are equal."""
    assert fault_line(one) == fault_line(other)
    assert "\n" not in fault_line(one)


def test_other_errors_give_other_lines() -> None:
    """Another type, text, dtype or injected fault → another line; an error without a text is its type."""
    errors = [
        ValueError("no float32 here"),
        ValueError("no float64 here"),
        TypeError("no float32 here"),
        ValueError(),
        InjectedFaultError("kill-1"),
        InjectedFaultError("kill-2"),
    ]
    assert len({fault_line(error) for error in errors}) == len(errors)
    assert fault_line(ValueError()) == "ValueError"
