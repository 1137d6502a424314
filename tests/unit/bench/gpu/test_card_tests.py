"""What `make gpu` reads from the report of tests/gpu."""

import pytest
from gpu.card_tests import figures_of

NAME = "test_workers_on_a_card_give_the_bits_of_the_plain_loop_there"


def report(*cases: tuple[str, str]) -> str:
    """A report of pytest: names and outcomes."""
    body = {"passed": "", "failed": '<failure message="m">x</failure>', "error": "<error/>", "skipped": "<skipped/>"}
    lines = [f'<testcase classname="tests.gpu" name="{name}">{body[outcome]}</testcase>' for name, outcome in cases]
    return f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"


def test_each_case_of_exactness_is_a_figure() -> None:
    """A case that failed is 0. One that was skipped has no figure, so that its row fails."""
    figures = figures_of(
        report(
            (f"{NAME}[float32-1]", "passed"),
            (f"{NAME}[float32-2]", "failed"),
            (f"{NAME}[bfloat16-1]", "skipped"),
            ("test_other", "error"),
        )
    )
    assert (figures["exact_float32_1"], figures["exact_float32_2"]) == (1, 0)
    assert "exact_bfloat16_1" not in figures
    assert (figures["num_passed"], figures["num_failed"], figures["num_skipped"]) == (1, 2, 1)


def test_a_report_without_a_test_that_ran_is_no_success() -> None:
    """All skipped: torch found no card."""
    with pytest.raises(ValueError, match="no test ran; 1 were skipped"):
        figures_of(report((f"{NAME}[float32-1]", "skipped")))
