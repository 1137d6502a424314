"""Plant each bug of mutants.toml in a copy of the tree and see a named test turn red.

    [name_of_the_bug]
    bug = "what is wrong now"
    test = "tests/…::test_name"     # one or more, separated by spaces
    file = "stages/…"
    old = "…"                       # whole lines that stand in the file exactly once
    new = "…"

`python tests/mutants/run.py [name …]` prints a table and ends with 1 if a bug survived, its old lines are gone, or a
named test is red without its bug.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300
CAUGHT = "caught"
TEST_FAILED = 1  # pytest's exit status when a test failed; a crash or an empty selection is another number


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug."""

    name: str
    bug: str
    test: str
    file: str
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError unless the old lines stand in it once."""
        if (count := f"\n{text}".count(f"\n{self.old}")) != 1:
            raise ValueError(f"its old lines stand {count} times in {self.file}")
        return f"\n{text}".replace(f"\n{self.old}", f"\n{self.new}")[1:]


def read_mutants() -> list[Mutant]:
    """All mutants of the table. Raises TypeError for one that lacks a field, or has another."""
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [Mutant(name=name, **fields) for name, fields in table.items()]


def copy_tree(target: Path) -> None:
    """The tracked and new files of the working tree, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def run_test(test: str, tree: Path, *, deadline_s: float = DEADLINE_S, stops_early: bool = True) -> int:
    """Run tests on the code of `tree`, also in the processes that they start; pytest's exit status.

    test: one or more, separated by spaces.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree / ".typing"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *test.split()]
    command += ["-x"] if stops_early else []
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return TEST_FAILED  # the bug made it hang
    return done.returncode


def red_without_a_bug(tests: list[str], tree: Path) -> list[str]:
    """Those of the named tests that fail on the code as it is. All run at once, and one by one if that fails."""
    if run_test(" ".join(tests), tree, deadline_s=len(tests) * DEADLINE_S, stops_early=False) == 0:
        return []
    red = [test for test in tests if run_test(test, tree) != 0]
    for test in red:
        print(f"RED WITHOUT A BUG  {test}", flush=True)  # noqa: T201
    return red


def plant(mutant: Mutant, tree: Path) -> str:
    """Whether the named test finds the bug."""
    path = tree / mutant.file
    text = path.read_text()
    try:
        path.write_text(mutant.applied_to(text))
    except (OSError, ValueError) as error:
        return f"DOES NOT APPLY: {error}"
    status = run_test(mutant.test, tree)
    path.write_text(text)
    return {TEST_FAILED: CAUGHT, 0: "SURVIVED"}.get(status, f"pytest ended with {status}")


def main(names: list[str]) -> int:
    mutants = [mutant for mutant in read_mutants() if not names or mutant.name in names]
    if unknown := sorted(set(names) - {mutant.name for mutant in mutants}):
        print(f"no such mutant: {', '.join(unknown)}")  # noqa: T201
        return 2
    trees: SimpleQueue[Path] = SimpleQueue()

    def try_one(mutant: Mutant) -> bool:
        tree, began = trees.get(), time.monotonic()
        verdict = plant(mutant, tree)
        trees.put(tree)
        print(f"{verdict:9} {time.monotonic() - began:6.1f} s  {mutant.name}: {mutant.bug}", flush=True)  # noqa: T201
        return verdict == CAUGHT

    began, num_trees = time.monotonic(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as scratch, ThreadPoolExecutor(num_trees) as threads:
        for number in range(num_trees):
            copy_tree(Path(scratch) / str(number))
            trees.put(Path(scratch) / str(number))
        red = red_without_a_bug(sorted({mutant.test for mutant in mutants}), Path(scratch) / "0")
        num_caught = sum(threads.map(try_one, mutants))
    num_wrong = len(mutants) - num_caught
    seconds = time.monotonic() - began
    print(f"{num_caught} caught, {num_wrong} not, {len(red)} tests red without a bug, in {seconds:.0f} s")  # noqa: T201
    return int(num_wrong > 0 or bool(red))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
