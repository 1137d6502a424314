"""Plant each bug of this folder in a copy of the tree and see a named test turn red.

A mutant is a patch with two lines above it:

    # bug: what is wrong now
    # caught by: tests/…::test_name

`python tests/mutants/run.py [name …]` prints a table and ends with 1 if a bug survived, a patch no longer applies, or
a named test is red without its bug.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300
TEST_FAILED = 1  # pytest's exit status when a test failed; a crash or an empty selection is another number


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug."""

    path: Path
    bug: str
    test: str

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


def read_mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """All mutants of the folder. Raises ValueError for a patch without its two lines."""
    mutants = []
    for path in sorted(folder.glob("*.patch")):
        fields = {}
        for line in path.read_text().splitlines():
            if not line.startswith("# "):
                break
            key, _, value = line[2:].partition(": ")
            fields[key] = value.strip()
        if set(fields) != {"bug", "caught by"}:
            raise ValueError(f"{path.name}: expected '# bug: …' and '# caught by: …' above the patch")
        mutants.append(Mutant(path, fields["bug"], fields["caught by"]))
    return mutants


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


def apply(mutant: Mutant, tree: Path, *, reverse: bool = False) -> None:
    """Plant the bug, or take it out again. Raises CalledProcessError with git's own words."""
    command = ["git", "apply", "-p1", "--recount", *(["--reverse"] if reverse else []), str(mutant.path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)


def run_test(test: str, tree: Path) -> int:
    """Run one test on the code of `tree`, also in the processes that it starts; pytest's exit status."""
    environment = {**os.environ, "PYTHONPATH": str(tree / ".typing"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *test.split()]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return TEST_FAILED  # the bug made it hang
    return done.returncode


def main(names: list[str]) -> int:
    mutants = [mutant for mutant in read_mutants() if not names or mutant.name in names]
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        for test in sorted({mutant.test for mutant in mutants}):
            if (status := run_test(test, tree)) != 0:
                print(f"RED WITHOUT A BUG  {test} (pytest said {status})")  # noqa: T201
                num_wrong += 1
        for mutant in mutants:
            began = time.monotonic()
            try:
                apply(mutant, tree)
            except subprocess.CalledProcessError as error:
                verdict, num_wrong = f"DOES NOT APPLY: {error.stderr.strip()}", num_wrong + 1
            else:
                killed = run_test(mutant.test, tree) == TEST_FAILED
                verdict = "caught" if killed else "SURVIVED"
                num_wrong += not killed
                apply(mutant, tree, reverse=True)
            print(f"{verdict:9} {time.monotonic() - began:6.1f} s  {mutant.name}: {mutant.bug}", flush=True)  # noqa: T201
    print(f"{len(mutants) - num_wrong} passed, {num_wrong} failed")  # noqa: T201
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
