"""Rules for the documentation: links lead somewhere, files exist, every page is in the index, no sentence twice."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.cli.program import program
from headway.daemon.cluster.records import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "systemd/README.md", *(ROOT / "docs").glob("*.md")]
)
LOG = ROOT / "docs/decisions.md"
ROOMS = ("api", "daemon", "stages", "optim", "proto", "tests", "bench")
MAX_README_LINES = 220
MIN_SENTENCE_WORDS = 6
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SHELL_BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PYTHON_FILE = re.compile(r"[\w/]+\.py\b")
_PLACE = re.compile(r"`([\w/]+\.py)::(\w+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return _CODE_BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = [line.lstrip("#").strip() for line in prose(page).splitlines() if line.startswith("#")]
    return {_NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def sentences(page: Path) -> list[str]:
    """The sentences of a page's paragraphs and lists; tables, headings and indented code are left out."""
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "#", "    "))]
    paragraphs = re.split(r"\n\s*\n|\n- ", "\n".join(lines))
    found = [part.strip() for text in paragraphs for part in re.split(r"(?<=[.:!?])\s+", " ".join(text.split()))]
    return [sentence for sentence in found if len(sentence.split()) >= MIN_SENTENCE_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """A file or picture that a page links to exists, and so does the heading behind #."""
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_file_that_a_page_names_exists(page: Path) -> None:
    """A page names a file by its path or by the end of it; the log of decisions may name files of the past."""
    files = [f"/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    named = set(_PYTHON_FILE.findall(page.read_text())) - {"my_things.py"}  # a reader saves that one
    assert not [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_place_in_a_file_that_a_page_names_exists(page: Path) -> None:
    """`folder/file.py::name` names a function, class or table that the file defines."""
    for file, name in _PLACE.findall(page.read_text()):
        paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if str(path).endswith(f"/{file}")]
        defined = re.compile(rf"^\s*(async def|def|class) {name}\b|^{name}\b.*=|self\.{name} = ", re.MULTILINE)
        assert any(defined.search(path.read_text()) for path in paths), f"{file}::{name}"


def commands(page: Path) -> list[list[str]]:
    """The commands `headway …` in a page's blocks for the shell, as words; lines that go on are joined."""
    found = []
    for block in _SHELL_BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;", line.removeprefix("$ ").partition("  #")[0]):
                words = part.split()
                if words and words[0].rpartition("/")[2] == "headway" and not words[0].startswith("#"):
                    found.append(words[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    """People copy them: a command or an option that was renamed must not stay behind on a page."""
    for words in commands(page):
        command: Any = program()
        rest = [*words]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        if set(getattr(command, "commands", {})) >= {"make", "revoke"}:  # `headway certs DIR …`
            command = command.commands["make"]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        told = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help", "--version"}
        assert not getattr(command, "commands", {}) or getattr(command, "invoke_without_command", False), words
        assert told <= known, f"headway {' '.join(words)}: {told - known}"


def test_the_help_lists_commands_under_the_titles_of_the_page() -> None:
    """`headway --help` has each command under the title of the first table of docs/commands.md that names it."""
    panels: dict[str, str] = {}
    for line in (ROOT / "docs/commands.md").read_text().splitlines():
        if title := re.match(r"\| ([a-z ]+) \| \|$", line):
            panel = title[1]
        elif line.startswith("| `headway"):
            panels = dict.fromkeys(re.findall(r"`headway (\w+)", line.split(" | ")[0]), panel) | panels
    assert {name: command.rich_help_panel for name, command in program().commands.items()} == panels


def test_every_alert_has_a_runbook_whose_command_exists() -> None:
    """Whoever is woken by an alert types what it says; a command of ours must be one."""
    rules = (ROOT / "systemd/prometheus/headway.rules.yml").read_text()
    alerts, runbooks = re.findall(r"- alert: (\w+)", rules), re.findall(r"runbook: (.*)", rules)
    assert len(alerts) == len(runbooks) > 0
    for told in runbooks:
        typed = re.findall(r"`(\w[^`]*)`", told)
        assert typed, told
        for words in (each.split() for each in typed if each.startswith("headway ")):
            command: Any = program()
            for word in words[1:]:
                command = getattr(command, "commands", {}).get(word, command)
            assert command.name in words, f"`{' '.join(words)}`"


def test_the_changelog_names_the_protocol_of_this_release() -> None:
    """Whoever upgrades looks there whether old and new daemons train together."""
    newest = (ROOT / "CHANGELOG.md").read_text().split("|---|---|---|---|\n")[1].splitlines()[0]
    assert newest.split(" | ")[2] == str(PROTOCOL_VERSION)


def test_the_readme_stays_short() -> None:
    """The README has at most MAX_README_LINES lines; the rest belongs into docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_index_names_every_page_and_picture_is_shown() -> None:
    """docs/README.md links to every page of docs/, and some page links to every picture there."""
    index = set(_LINK.findall((ROOT / "docs/README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index
    everything = "".join(page.read_text() for page in PAGES)
    assert not [picture.name for picture in (ROOT / "docs").glob("*.png") if picture.name not in everything]


def test_no_sentence_stands_twice() -> None:
    """A sentence stands on one page, in one place; other places link to it."""
    counted = Counter(sentence for page in PAGES for sentence in sentences(page))
    assert not [sentence for sentence, number in counted.items() if number > 1]
