"""A mistyped path is answered with the nearest name that is there."""

from pathlib import Path

import pytest

from headway.daemon.base.near_path import near


@pytest.mark.parametrize(
    ("typed", "others", "hint"),
    [
        ("modle", (), "; did you mean `model`?"),
        ("modls/small", (), "; did you mean `models/small`?"),
        ("modls/tiny", (), ""),  # no folder of a near name has it
        ("python-stdlb", ("python-stdlib",), "; did you mean `python-stdlib`?"),
        ("chats", (), ""),
        ("model", (), ""),  # it is there
        ("m" * 5000, (), ""),
        ("a\0b", (), ""),
    ],
)
def test_the_nearest_name_is_named(tmp_path: Path, typed: str, others: tuple[str, ...], hint: str) -> None:
    """Of a file or a folder, also where a folder on the way to it is mistyped."""
    (tmp_path / "model").mkdir()
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert near(tmp_path / typed, others) == hint
