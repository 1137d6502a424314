"""Only stages/device/ talks to the device on the path of a microbatch: no other line makes the host wait for it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[4]
PATH: Final = (
    "stages/stage",
    "stages/links",
    "stages/telemetry",
    "stages/state/weight_versions.py",
    "stages/state/snapshot_writer.py",
)
"""Folders and files that a run calls between its boundaries."""
FORBIDDEN: Final = frozenset(
    {"cpu", "cuda", "item", "tolist", "synchronize", "wait_stream", "record_stream", "pin_memory"}
)
EXCEPTIONS: Final = {
    "stages/links/attachment.py": "threads of the link, which do not compute",
    "stages/links/nccl.py": "tensors between cards have streams of NCCL",
}


def files() -> Iterator[Path]:
    """The files of the path, without the exceptions."""
    for name in PATH:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if not any(file.is_relative_to(ROOT / exception) for exception in EXCEPTIONS):
                yield file


def waits(source: str) -> list[int]:
    """Lines with a call that may wait for a device, or that moves a tensor to one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in FORBIDDEN or (node.func.attr == "to" and _moves(node)))
    ]


def _moves(call: ast.Call) -> bool:
    """Whether a `.to` names a device: by a keyword, or by an argument that says so."""
    named = {keyword.arg for keyword in call.keywords}
    said = " ".join(ast.unparse(argument) for argument in call.args)
    return bool(named & {"device", "non_blocking"}) or "device" in said or '"cpu"' in said or "'cpu'" in said


def test_nothing_on_the_path_waits_for_the_device() -> None:
    """No `.cpu()`, `.item()`, `.tolist()`, `synchronize` and no `.to(device)` outside the seam."""
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files() for line in waits(file.read_text())]
    assert found == []


def test_the_path_is_where_the_rule_looks() -> None:
    """The rule sees many files, and each exception exists."""
    assert len(list(files())) > 25
    assert all((ROOT / exception).exists() for exception in EXCEPTIONS)


def test_a_wait_is_found() -> None:
    """Every forbidden form in a line of its own → all are found, and a change of type is not."""
    moved = ["t.to(self.device)", "t.to(device=d)", "t.to('cpu')", "t.to(dtype)"]
    source = "\n".join(["t.cpu()", "t.item()", "t.tolist()", "stream.synchronize()", *moved])
    assert waits(source) == [1, 2, 3, 4, 5, 6, 7]
