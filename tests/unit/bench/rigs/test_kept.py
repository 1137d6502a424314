"""What a bench keeps."""

from pathlib import Path

from rigs.kept import Kept


def test_a_run_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    first = Kept(path)
    first.keep("a", 1.5)
    first.keep("b", {"ends": [1, 2]})
    assert Kept(path).found == first.found == {"a": 1.5, "b": {"ends": [1, 2]}}
    nowhere = Kept(None)
    nowhere.keep("a", 1)
    assert nowhere.found == {"a": 1}
