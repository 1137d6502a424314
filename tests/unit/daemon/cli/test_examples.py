"""`headway init`: files to begin with."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.daemon.cli.examples import examples
from headway.daemon.jobs.job_file import read_job_file

ROOT = Path(__file__).resolve().parents[4]
Headway = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written where nothing lies."""
    monkeypatch.chdir(tmp_path)


def test_a_job_to_begin_with_is_read_and_planned(headway: Headway) -> None:
    """It has the name that was given, and what is told to be typed next names its file."""
    code, out, err = headway("init", "own-job")
    assert (code, err) == (0, "")
    assert "headway run own-job.toml --nodes 2 --out runs/own-job" in out
    assert read_job_file(Path("own-job.toml"))[0].job.name == "own-job"
    assert headway("plan", "own-job.toml", "--nodes", "2")[0] == 0


def test_a_fine_tune_starts_from_the_model_that_was_named(headway: Headway) -> None:
    """The model stands in the file, quoted as TOML needs it, and the data of it is the first thing to type."""
    code, out, _ = headway("init", "mine", "--from", 'a "model"')
    assert (code, out.splitlines()[1].split()[:3]) == (0, ["headway", "data", "prepare"])
    assert 'from = "a \\"model\\""' in Path("mine.toml").read_text()
    assert 'name = "mine"' in Path("mine.toml").read_text()


def test_a_file_that_is_there_stays(headway: Headway) -> None:
    """Asked twice: one line, code 2, and the file as it was."""
    Path("first.toml").write_text("mine")
    code, out, err = headway("init")
    assert (code, out, Path("first.toml").read_text()) == (2, "", "mine")
    assert err == "headway: first.toml: is there already, and stays; give another name, or delete it\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Ä b"], "NAME: 'Ä b' cannot be the name of a job"),
        (
            ["x", "--example", "../../etc/passwd"],
            "--example: no example is named '../../etc/passwd'; there are demo.toml, ",
        ),
        (["x", "--example", "small", "--from", "m"], "--example: excludes --from"),
        (["x", "--from", "a\nb"], "--from: 'a\\nb' has characters that cannot be printed"),
        (["/proc/x/y"], "/proc/x/y.toml: cannot be written: "),
    ],
)
def test_what_cannot_be_written_is_one_line(headway: Headway, arguments: list[str], line: str) -> None:
    code, out, err = headway("init", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"headway: {line}")
    assert not list(Path().iterdir())


def test_the_wheel_writes_its_examples(tmp_path: Path) -> None:
    """Built and unpacked elsewhere, it has every file of the two folders, and the types of `headway`."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    tree, unpacked = tmp_path / "tree", tmp_path / "unpacked"
    tree.mkdir()
    wanted = [name for name in names if name and not name.startswith(("tests/", "bench/")) and (ROOT / name).exists()]
    subprocess.run(["cp", "--parents", "--no-dereference", *wanted, tree], cwd=ROOT, check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--disable-pip-version-check", "--wheel-dir", tmp_path, tree], check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    assert (unpacked / "headway/py.typed").exists()
    code = (
        "import headway, sys\nfrom headway.daemon.cli.program import run\n"
        "assert headway.__file__.startswith(sys.argv[1]), headway.__file__\n"
        "from headway.daemon.cli.examples import examples\nprint(*examples())\n"
        "sys.exit(run(['init', 'small', '--example', 'small']))"
    )
    # Isolated from the editable installation, whose finder would answer first.
    hidden = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + code, str(unpacked)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(unpacked)}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == [*examples()]
    assert (tmp_path / "small.toml").read_text() == (ROOT / "docs/jobs/small.toml").read_text()
