"""How the daemon learns that the process of its shared port stands still: that writes a byte each second."""

import asyncio
from typing import Final

SILENT_S: Final = 5.0
"""Silence that counts."""
NUM_SILENCES: Final = 2
"""Number of silences in a row after which it hangs. The first one may be that of a daemon that stood still itself."""
START_S: Final = 60.0
"""Time for the first byte."""
_PIECE_BYTES: Final = 4096


async def falls_silent(beats: asyncio.StreamReader) -> bool:
    """Return True once the process hangs, False once it has ended."""
    has_begun, num_silences = False, 0
    while num_silences < NUM_SILENCES:
        try:
            async with asyncio.timeout(SILENT_S if has_begun else START_S):
                raw = await beats.read(_PIECE_BYTES)
        except TimeoutError:
            num_silences += 1
            continue
        if not raw:
            return False
        has_begun, num_silences = True, 0
    return True
