"""What a daemon says to Prometheus, as tests read it, and the page that lists it."""

import re
import urllib.request
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/monitoring.md"
ROW = re.compile(r"^\| `(headway_\w+)` .*\n", re.MULTILINE)


def families(text: str) -> dict[str, str]:
    """Return the metrics of a scrape: name to help."""
    return dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE))


def told_in(page: str) -> list[str]:
    """Return the names of metrics in the page's table."""
    return ROW.findall(page)


def text_of(port: int) -> str:
    """The text of one scrape."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
