"""The files of docs/plugins.md, as a reader saves them."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/plugins.md"


def write_files(folder: Path) -> Path:
    """Write my_things.py and job.toml with what every section adds to them; return the job file."""
    text = PAGE.read_text()
    (folder / "my_things.py").write_text("\n\n".join(_blocks(text, "python")))
    job: dict[str, dict[str, Any]] = {}
    for block in _blocks(text, "toml"):
        for section, keys in tomllib.loads(block).items():
            if section != "allow_plugins":  # of a node
                job[section] = job.get(section, {}) | keys
    file = folder / "job.toml"
    file.write_text("".join(f"[{name}]\n" + "".join(map(_line, keys.items())) for name, keys in job.items()))
    return file


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _line(entry: tuple[str, Any]) -> str:
    return f"{entry[0]} = {_text(entry[1])}\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_text(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
