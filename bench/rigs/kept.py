"""What a bench has measured, line by line in a file: an interrupted run goes on there."""

import json
from pathlib import Path
from typing import Any


class Kept:
    """Values by name. A file of None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[str, Any] = {}
        if path and path.exists():
            self.found |= (json.loads(line) for line in path.read_text().splitlines())
        elif path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value that JSON can have."""
        self.found[name] = value
        if self._path:
            with self._path.open("a") as lines:
                lines.write(json.dumps([name, value]) + "\n")
