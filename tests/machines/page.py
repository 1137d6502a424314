"""The commands of docs/deployment.md, as a reader meets them: those of its blocks for the shell, one line each."""

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"


def commands() -> list[str]:
    """Return every command of the page's shell blocks; lines that go on are joined, remarks are left out."""
    found: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = " ".join(line.split())
            if words and not words.startswith("#"):
                found.append(re.sub(r" # .*$", "", words))
    return found


def command(start: str, *having: str) -> str:
    """Return the one command that begins so and has these parts."""
    found = [line for line in commands() if line.startswith(start) and all(part in line for part in having)]
    assert len(found) == 1, f"docs/deployment.md has {len(found)} commands `{start} … {' '.join(having)}`: {found}"
    return found[0]


def option(name: str) -> str:
    """Return the value that the page gives an option in its text: `--announce 203.0.113.7:41022`."""
    found = set(re.findall(rf"`{re.escape(name)} ([^\s`]+)`", PAGE.read_text()))
    assert len(found) == 1, f"docs/deployment.md gives {name} the values {found}"
    return str(found.pop())


def flags(line: str) -> dict[str, str]:
    """Return the flags of a command with their values, without the hyphens; a flag without one is `true`."""
    words = [word for word in shlex.split(line) if word != "…"]
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = "true" if following.startswith("--") else following
    return found
