"""The files of docs/plugins.md, as a reader saves them."""

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/plugins.md"


def write_files(folder: Path) -> Path:
    """Write my_things.py and job.toml; return the job file."""
    text = PAGE.read_text()
    (folder / "my_things.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    job = folder / "job.toml"
    job.write_text("\n".join(re.findall(r"```toml\n(\[job\].*?)```", text, re.DOTALL)))
    return job
