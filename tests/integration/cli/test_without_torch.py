"""A machine without torch asks a cluster, and says in one line what it cannot do."""

import json
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Program

FORBIDDEN = """\
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture(scope="module")
def client(standing: Program, tmp_path_factory: pytest.TempPathFactory) -> "Client":
    """Command lines of an interpreter that finds no torch, in the folder of a cluster whose nodes have it."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "sitecustomize.py").write_text(FORBIDDEN)
    return Client(standing, folder)


class Client:
    """Runs command lines that find no torch."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._folder = folder

    def run(self, line: str) -> tuple[int, str, str]:
        """The outcome of a command line."""
        return self.program.ended(self.program.start(*line.split(), variables={"PYTHONPATH": str(self._folder)}))


def test_a_client_needs_no_torch(client: Client) -> None:
    """It submits a job, looks at it until its end and afterwards, drains a node, and makes certificates."""
    job = client.program.job(name="asked", batches=6)
    for line in (f"submit {job}", "watch asked --json", "status asked", "jobs", "nodes", "events asked", "logs asked"):
        code, out, err = client.run(line)
        assert (code, "Traceback" in err) == (0, False), f"{line}: {err}"
        assert out, line
    code, out, err = client.run("history asked --json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]  # the last line may be that of the goodput
    assert [row["batch"] for row in rows if "goodput_s" not in row] == [*range(6)]
    for line in ("drain node-2", "nodes release node-2", f"plan {job} --nodes 2", "certs made a --operator me"):
        code, out, err = client.run(line)
        assert code == 0, f"{line}: {err}"
    code, _, err = client.run("relay --certs nowhere")
    assert (code, "nowhere" in err, "torch" in err) == (2, True, False), err
    code, _, err = client.run("invite ann")
    assert (code, "no daemon has the authority" in err) == (2, True), err
    assert "torch: not installed, and only a machine that computes needs it" in client.run("doctor")[1]


@pytest.mark.parametrize(
    "line", ["export asked --out model", "reference asked.toml --out plain", "run asked.toml --out run", "up", "daemon"]
)
def test_what_computes_says_in_one_line_what_is_missing(client: Client, line: str) -> None:
    client.program.job(name="asked", batches=6)
    code, out, err = client.run(line)
    needed = "headway: this command needs torch, which is not installed: `pip install 'headway[node]'`\n"
    assert (code, out, err) == (2, "", needed)
