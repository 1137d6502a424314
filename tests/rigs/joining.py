"""Parts that tests of joining share."""

import asyncio
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from headway.daemon.cli import program as cli


async def program(folder: Path, *words: str) -> str:
    """What `headway` prints for a command that succeeds: in this process, which has imported it."""
    out, error = StringIO(), StringIO()

    def here() -> int:
        with chdir(folder), redirect_stdout(out), redirect_stderr(error):
            return cli.run(list(words))

    assert await asyncio.to_thread(here) == 0, error.getvalue()
    return out.getvalue().strip()
