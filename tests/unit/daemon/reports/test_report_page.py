"""The page as a file: nothing from outside runs in it, and it asks no host for anything."""

import json
import re
from fnmatch import fnmatch
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from tomllib import loads

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.reports.picture import picture_of
from headway.daemon.reports.report_page import PAGE, SCRIPTS, STYLES, page_html, write_report
from tests.rigs.pictured_job import BEGAN_S, job_view, rows

UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of npm's uplot 1.6.32."""


class Elements(HTMLParser):
    """The elements of a page, with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if not self.found:
            return
        tag, attributes, text = self.found[-1]
        self.found[-1] = (tag, attributes, text + data)


def page(name: str = "demo") -> str:
    return page_html(picture_of(job_view(400, name=name), {}, rows(400, num_generations=4), now_s=BEGAN_S))


def test_the_page_asks_no_host() -> None:
    """No element loads anything, and the policy forbids it, also to scripts."""
    found = Elements(page()).found
    assert not [(tag, name) for tag, attributes, _ in found for name in attributes if name in ("src", "href", "srcset")]
    policy = next(attributes["content"] for _, attributes, _ in found if attributes.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert not re.search(r"https?:|unsafe|\*", policy)
    own = "".join((PAGE / name).read_text() for name in ("curves.js", "panels.js", "page.css", "report.html"))
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", own)


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--<script>", "\u2028']]>&lt;"])
def test_a_crafted_name_stays_text(name: str) -> None:
    """The name ends no element, and reads back as it was."""
    plain, found = Elements(page()).found, Elements(page(name)).found
    assert [tag for tag, _, _ in found] == [tag for tag, _, _ in plain]
    picture = next(text for _, attributes, text in found if attributes.get("id") == "picture")
    assert json.loads(picture)["job"] == name


def test_the_page_of_a_short_job_is_small() -> None:
    """Most of it is uPlot."""
    assert len(page().encode()) < 200_000


def test_uplot_is_the_published_one_and_in_the_wheel() -> None:
    """Its files are npm's, byte for byte; the wheel has them, with the licence and our own."""
    assert {name: sha256((PAGE / name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
    assert "MIT License" in (PAGE / "uPlot.LICENSE").read_text()
    root = Path(__file__).parents[4]
    data = loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["headway.daemon.reports"]
    for name in (*STYLES, *SCRIPTS, "report.html", "uPlot.LICENSE"):
        assert any(fnmatch(f"page/{name}", pattern) for pattern in data)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """One line that names the path."""
    picture = picture_of(job_view(4), {}, rows(4), now_s=BEGAN_S)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(picture, tmp_path / "none" / "run.html")


def test_a_page_replaces_an_earlier_page_and_no_other_file(tmp_path: Path) -> None:
    """What Headway did not write stays as it is, and one line says what to do."""
    picture, out = picture_of(job_view(4), {}, rows(4), now_s=BEGAN_S), tmp_path / "run.html"
    for _ in range(2):
        write_report(picture, out)
    assert out.read_text() == page_html(picture)
    out.write_text("<!doctype html>\n<p>mine")
    with pytest.raises(ConfigError, match="exists, and headway did not write it; name another file, or move it away"):
        write_report(picture, out)
    assert out.read_text() == "<!doctype html>\n<p>mine"
