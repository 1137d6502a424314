"""The summary of a preparation: what was left out, and why."""

import json
from pathlib import Path

from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.daemon.text.summary import lines_of


def test_bad_records_are_named_ten_at_most_and_counted_by_kind(tmp_path: Path) -> None:
    """Of fourteen, ten have a warning with file and line; the summary counts two kinds."""
    good = [json.dumps({"text": "one"})]
    bad = ["no JSON", *[json.dumps({"texts": number}) for number in range(13)]]
    (tmp_path / "in.jsonl").write_text("\n".join(good + bad))
    warned: list[str] = []
    out = tmp_path / "out"
    prepared = prepare([str(tmp_path / "in.jsonl")], out, Preparation(max_bad=20), warn=warned.append)
    assert len(warned) == 10
    assert "in.jsonl, line 2: is not JSON" in warned[0]
    lines = list(lines_of(out, prepared))
    assert "left out, because they could not be used: 14 records" in lines
    counted = [line for line in lines if line.startswith("  ")]
    assert counted[0].startswith("  13: has no text in the field 'text'")
    assert counted[1].startswith("  1: is not JSON")
