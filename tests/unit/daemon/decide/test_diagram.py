"""docs/coordinator.md is the coordinator's table. HEADWAY_WRITE=1 writes the page again."""

import os
from pathlib import Path

from headway.daemon.cluster.records import TERMINAL_PHASES, Phase
from headway.daemon.decide.coordinator import TABLE, Row

HEAD = """# How a job moves from phase to phase

`HEADWAY_WRITE=1 pytest tests/unit/daemon/decide/test_diagram.py` writes this page from the table in
`daemon/decide/coordinator.py`; without the variable it compares them.

The coordinator tries the rows of a phase from top to bottom. The first row whose condition holds becomes one
transaction: it compares every record that was read, and writes the phase, its reason, an event and the job's other
keys. A condition that needs a plan does not hold while the plan is being computed. An action that needs a plan waits
for it; rows above it still go first.
"""


def page() -> str:
    """Return the whole page, in Markdown."""
    return "\n".join([HEAD, *_diagram(), "", *_table()]) + "\n"


def _diagram() -> list[str]:
    """Return a mermaid state diagram: one arrow for each pair of phases, with the conditions that lead along it."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for row in TABLE:
        if row.phase is not row.next_phase:
            arrows.setdefault((row.phase, row.next_phase), []).append(_words(row.condition.__name__))
    # arrows to cancelled and failed start at nearly every phase; the table has them
    drawn = {pair: why for pair, why in arrows.items() if pair[1] not in (Phase.CANCELLED, Phase.FAILED)}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.QUEUED}"]
    lines += [f"    {before} --> {after}: {' / '.join(why)}" for (before, after), why in drawn.items()]
    lines += [f"    {phase} --> [*]" for phase in Phase if phase is Phase.FINISHED]
    lines += ["```", "", "Not drawn: the arrows to failed and cancelled; the table has them."]
    return lines


def _table() -> list[str]:
    lines = ["| phase | condition | what is written | next phase |", "|---|---|---|---|"]
    before: Phase | None = None
    for row in TABLE:
        phase = "" if row.phase is before else row.phase
        lines.append(f"| {phase} | {_words(row.condition.__name__)} | {_action(row)} | {row.next_phase} |")
        before = row.phase
    ends = " and ".join(
        phase
        for phase in Phase
        if phase in TERMINAL_PHASES and not any(row.phase is phase and row.next_phase is not phase for row in TABLE)
    )
    return [*lines, "", f"Nothing leads out of {ends}."]


def _action(row: Row) -> str:
    return (row.action.__doc__ or "").partition("\n")[0]


def _words(name: str) -> str:
    return name.replace("_", " ")


def test_page_in_docs_is_the_table() -> None:
    path = Path(__file__).parents[4] / "docs/coordinator.md"
    if os.environ.get("HEADWAY_WRITE"):
        path.write_text(page())
    assert path.read_text() == page()
