"""What two workers with the same error say of it."""

import pytest

from headway.daemon.fault_points import InjectedFaultError
from headway.daemon.worker.out_of_memory import fault_line


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
