"""Runs tests/gpu and counts: what failed, and which promises of exactness held on this machine's card.

exact_DTYPE_WORKERS: 1 if the test of that case passed. --device cpu runs those tests that a CPU can: the variable
HEADWAY_GPU_TESTS_ON takes them there.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from gpu.probe import Parts

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "HEADWAY_GPU_TESTS_ON"
_EXACT = re.compile(r"test_workers_on_a_card_give_the_bits_of_the_plain_loop_there\[(?P<dtype>\w+)-(?P<workers>\d)\]")


def figures_of(report: str) -> dict[str, object]:
    """Return the figures of a JUnit report. Raises ValueError for one without a test that ran."""
    outcomes = {case.get("name", ""): _outcome(case) for case in ElementTree.fromstring(report).iter("testcase")}
    counted = {outcome: list(outcomes.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}
    if not counted["passed"] + counted["failed"]:
        raise ValueError(f"no test ran; {counted['skipped']} were skipped")
    exact = {
        f"exact_{found['dtype']}_{found['workers']}": int(outcome == "passed")
        for name, outcome in outcomes.items()
        if outcome != "skipped" and (found := _EXACT.fullmatch(name))
    }
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    return {**{f"num_{outcome}": number for outcome, number in counted.items()}, **exact, "failed": failed}


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def measure(device: str) -> Parts:
    """Run them in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        environment = {**os.environ, ENVIRONMENT: device, "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={path}"]
        subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        yield figures_of(path.read_text())
