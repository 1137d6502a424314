"""The files from which other tools build and start Headway: they name what exists, and nothing runs as root."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SLURM = ROOT / "docs/examples/slurm.sbatch"


def test_the_image_has_every_folder_of_the_wheel() -> None:
    """What the Dockerfile copies exists, is not ignored, and is what pyproject.toml builds the wheel of."""
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    folders = {*PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert copied == folders | {"LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied


def test_the_quick_suite_has_what_it_names() -> None:
    """A folder that moved would leave `make quick` without a test."""
    listed = subprocess.run(["make", "-pn", "help"], capture_output=True, text=True, cwd=ROOT, check=False).stdout
    names = re.search(r"^QUICK := (.*)$", listed, re.MULTILINE)
    assert names is not None
    assert all((ROOT / "tests/unit" / name).exists() for name in names[1].split()), names[1]


def test_the_image_does_not_run_as_root() -> None:
    """Its last user is a number other than 0, and both stages have one Python, because machine code is copied."""
    assert re.findall(r"^USER (\d+)", DOCKERFILE, re.MULTILINE)[-1] != "0"
    assert len(set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))) == 1
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", DOCKERFILE)
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}


def test_the_wheel_has_the_files_of_the_service() -> None:
    """Each file of systemd/ that `headway install` reads matches a pattern of the package's data."""
    from headway.daemon.cli.install import SHIPPED

    patterns = [
        *PROJECT["tool"]["setuptools"]["package-data"]["*"],
        *PROJECT["tool"]["setuptools"]["package-data"]["headway.systemd"],
    ]
    found = {
        str(path.relative_to(ROOT / "systemd")) for pattern in patterns for path in (ROOT / "systemd").glob(pattern)
    }
    assert {*SHIPPED.values()} <= found


def test_the_example_for_slurm_is_a_script_with_flags_that_exist() -> None:
    """bash reads it, and `headway daemon` has each flag. The warning comes earlier than the drain takes."""
    checked = subprocess.run(["bash", "-n", str(SLURM)], capture_output=True, text=True, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")
    text = SLURM.read_text()
    inside = text.partition("exec headway daemon")[2].replace("\\\n", " ").partition("\n")[0]
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", inside)}
    from headway.daemon.node.settings import FIELD_NAMES

    assert flags - {"certs"} <= {*FIELD_NAMES}
    (early,), (wait,) = re.findall(r"TERM@(\d+)", text), re.findall(r"--stop-timeout-s (\d+)", text)
    assert int(early) >= int(wait) + 30
