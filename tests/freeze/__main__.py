"""What a change of the house must leave as it is, as one JSON file that two trees can be compared by.

Each module of this folder has `record() -> dict[str, str]`, a name to a digest or a short text. The values hang on the
processor and on torch, so they are never committed: record in the old tree and in the new one, on one machine.

    python -m tests.freeze old.json [SECTION …]      # writes
    python -m tests.freeze --compare old.json new.json
"""

import importlib
import json
import sys
from pathlib import Path

SECTIONS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """The names whose values differ, or that one side lacks."""
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def main(arguments: list[str]) -> int:
    """Record into a file, or compare two of them; 1 where they differ."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
        return 0
    if arguments[0] == "--compare":
        old, new = (json.loads(Path(file).read_text()) for file in arguments[1:])
        found = differences(old, new)
        sys.stdout.write("\n".join([f"{len(new)} values, {len(found)} differ", *found, ""]))
        return bool(found)
    values: dict[str, str] = {}
    for section in arguments[1:] or SECTIONS:
        recorded = importlib.import_module(f"tests.freeze.{section}").record()
        values |= {f"{section}/{name}": value for name, value in recorded.items()}
    Path(arguments[0]).write_text(json.dumps(values, indent=1, sort_keys=True))
    sys.stdout.write(f"{len(values)} values in {arguments[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
