"""The table of `make gpu`: verdicts, the words of a failed probe, the JSON."""

import pytest
from gpu.probes import PROBES, chosen
from gpu.rows import ProbeResult, Row, Verdict, as_records, is_all_well, judge, table

RATIO = Row(name="a ratio", key="ratio", least=0.97)
SECONDS = Row(name="seconds", key="seconds", most=2.0, unit="s")
PLAIN = Row(name="plain", key="plain")


def measured(**figures: object) -> ProbeResult:
    """A probe that ended well."""
    return ProbeResult(figures=figures, seconds=1.0)


@pytest.mark.parametrize(
    ("row", "value", "verdict"),
    [
        (RATIO, 0.97, Verdict.OK),
        (RATIO, 0.9699, Verdict.MISSED),
        (SECONDS, 2, Verdict.OK),
        (SECONDS, 2.01, Verdict.MISSED),
        (PLAIN, -5.0, Verdict.OK),
        (PLAIN, None, Verdict.SKIPPED),
        (PLAIN, True, Verdict.FAILED),
        (PLAIN, float("nan"), Verdict.FAILED),
        (PLAIN, "fast", Verdict.FAILED),
    ],
)
def test_a_figure_is_judged_by_its_bar(row: Row, value: object, verdict: Verdict) -> None:
    """A bar is inclusive. What is no number, or not finite, has failed, whatever the bar."""
    assert judge(row, measured(**{row.key: value})).verdict is verdict


def test_a_probe_without_the_figure_fails_the_row_by_its_trouble() -> None:
    """A probe that hung after its first figure: that one counts, the other row says why it is missing."""
    result = ProbeResult(figures={"ratio": 1.0}, seconds=9.0, trouble="not done after 9 s")
    assert judge(RATIO, result).verdict is Verdict.OK
    late = judge(SECONDS, result)
    assert (late.verdict, late.reason) == (Verdict.FAILED, "not done after 9 s")
    assert "seconds" in judge(SECONDS, measured(ratio=1.0)).reason


def test_a_cpu_has_the_bars_of_exactness_alone() -> None:
    """Its speed says nothing of a card, so it misses no bar of one; other bits are wrong on any device."""
    bits = Row(name="bits", key="ratio", most=0, is_general=True)
    result = measured(ratio=0.5)
    assert [judge(row.on("cpu"), result).verdict for row in (RATIO, bits)] == [Verdict.OK, Verdict.MISSED]
    assert [judge(row.on("cuda"), result).verdict for row in (RATIO, bits)] == [Verdict.MISSED, Verdict.MISSED]


def test_a_skipped_row_says_what_the_machine_lacks() -> None:
    """One card cannot have a collective link; that is no failure."""
    judged = judge(PLAIN, measured(plain=None, plain_reason="one card"))
    assert judged.reason == "one card"
    assert is_all_well([judged])


def test_the_table_has_a_line_for_each_row_and_the_reasons_below() -> None:
    """A miss, a failure and a good row."""
    rows = [
        judge(RATIO, measured(ratio=0.5)),
        judge(SECONDS, ProbeResult(figures={}, seconds=1.0, trouble="out of memory")),
        judge(PLAIN, measured(plain=12.5)),
        judge(Row(name="more", key="more"), ProbeResult(figures={}, seconds=1.0, trouble="out of memory")),
    ]
    lines = table(rows).splitlines()
    assert lines[2].split() == ["a", "ratio", "0.5", "≥", "0.97", "missed"]
    assert lines[3].split() == ["seconds", "-", "≤", "2", "failed"]
    assert lines[4].split() == ["plain", "12.5", "-", "ok"]
    assert lines[-1] == "seconds; more: out of memory"
    assert not is_all_well(rows)
    assert [record["verdict"] for record in as_records(rows)] == ["missed", "failed", "ok", "failed"]


def test_every_probe_has_its_own_rows_and_all_together_are_quick() -> None:
    """Names and keys are unique, and even if every probe hung the table would be there after two hours, half an hour of
    which is the soak's."""
    names = [row.name for probe in PROBES for row in probe.rows]
    assert len(set(names)) == len(names)
    assert all(len({row.key for row in probe.rows}) == len(probe.rows) for probe in PROBES)
    assert sum(probe.limit_s for probe in PROBES) <= 110 * 60
    assert chosen(["soak", "tests"]) == (PROBES[0], PROBES[-1])
    assert chosen([]) == PROBES
