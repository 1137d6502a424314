"""`import headway`: the page and the notebook, run as they stand against a cluster."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Program

ROOT = Path(__file__).resolve().parents[3]
AS_A_NOTEBOOK = """\
import asyncio, json, sys

async def main():  # a notebook runs each cell inside a running event loop
    names = {"__name__": "__main__"}
    for block in json.loads(sys.stdin.read()):
        exec(block, names)

asyncio.run(main())
"""


def blocks_of_the_page() -> list[str]:
    """The blocks of docs/python.md."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)


def cells_of_the_notebook() -> list[str]:
    """The code of the example; its last value of a cell is not shown."""
    cells = json.loads((ROOT / "docs/examples/notebook.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(blocks: list[str], program: Program, *, job: str, code: str = AS_A_NOTEBOOK) -> str:
    """What the blocks print in the cluster's folder. job: the name that `my-job` stands for."""
    given = json.dumps([block.replace("my-job", job) for block in blocks])
    environment = program.environment() | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=given, capture_output=True, text=True, timeout=110, cwd=program.folder, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_page_does_what_it_says(standing: Program) -> None:
    """Submit, watch, history, export, the same bits by the plain loop, a plan, and the error of a wrong name."""
    standing.job(name="page", batches=6)
    said = run(blocks_of_the_page(), standing, job="page")
    assert "finished 5 " in said
    assert "job your-job: no such job; there are" in said
    assert (standing.folder / "exported/config.json").exists()


def test_the_notebook_runs(standing: Program) -> None:
    """Its cells one after the other; the last one says that the plain loop has the same losses."""
    standing.job(name="book", batches=6)
    *cells, last = cells_of_the_notebook()
    lines = last.splitlines()
    said = run([*cells, "\n".join([*lines[:-1], f"assert {lines[-1]}"])], standing, job="book")
    assert re.search(r"batch 6/6  loss \d\.\d{4}  finished", said)


def test_a_call_ends_at_its_deadline_and_names_itself(standing: Program) -> None:
    """A cluster that takes longer than it may: the call, its time and the cluster are named; the next call works."""
    code = (
        "import headway\nwith headway.Client() as cluster:\n"
        "    cluster._timeout_s = 1e-6\n"
        "    try:\n        cluster.jobs()\n    except TimeoutError as error:\n        print(error)\n"
        "    cluster._timeout_s = 30.0\n    cluster.jobs()\n"
        "try:\n    headway.Client(cluster='nowhere')\n"
        "except headway.StoreUnreachableError as error:\n    print(error)\n"
    )
    late, away = run([], standing, job="", code=code).splitlines()
    assert re.match(r"headway\.Client\.jobs: not done within 1e-06 s by the cluster of 127\.0\.0\.1:\d+$", late)
    assert away.startswith("nowhere: no cluster runs here")


def test_the_reference_leaves_the_settings_of_torch_alone(tmp_path: Path) -> None:
    """It computes elsewhere: threads and modes stay the caller's; an impossible job is a ConfigError of one line."""
    (tmp_path / "job.toml").write_text(
        'job.name = "j"\n[train]\nbatches = 1\nmicrobatches = 1\nsequence_length = 8\n'
        "[model]\nnum_hidden_layers = 1\nhidden_size = 16\nintermediate_size = 16\nnum_attention_heads = 2\n"
        "num_key_value_heads = 2\n"
    )
    (tmp_path / "bad.toml").write_text('job.name = "j"\n[train]\nbatches = 0\n')
    code = (
        "import torch, headway\ntorch.set_num_threads(3)\n(row,) = headway.reference('job.toml')\n"
        "print(row.batch, torch.get_num_threads(), torch.get_deterministic_debug_mode())\n"
        "try:\n    headway.reference('bad.toml')\nexcept headway.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=100, check=True
    )
    first, second = done.stdout.splitlines()
    assert (first, second.startswith("bad.toml:train.batches")) == ("0 3 0", True), done.stdout


@pytest.mark.parametrize("name", ["__version__", "Client", "plan", "reference", "JobReport"])
def test_the_package_is_light_until_it_is_used(name: str) -> None:
    """`import headway` loads nothing else of it, and no name of it loads torch, numpy or the planner."""
    code = (
        "import sys, headway\nassert not [each for each in sys.modules if each.startswith('headway.')]\n"
        f"assert headway.{name}\nassert {name!r} == '__version__' or {name!r} in dir(headway)\n"
        "print(*{'torch', 'numpy', 'headway.daemon.plan.planner'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"


FORKED = """\
import os, headway
with headway.Client() as client:
    if os.fork() == 0:
        for call in (client.jobs, headway.Client):
            try:
                call()
            except headway.ConfigError as error:
                print(error, flush=True)
        os._exit(0)
    os.wait()
    print("here:", len(client.jobs()) >= 0)
"""


def test_a_forked_process_is_told_that_it_cannot_ask(standing: Program) -> None:
    """The threads of a client stay in its process: an old client and a new one end with a sentence, and none hangs."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True, text=True, timeout=60, cwd=standing.folder, env=standing.environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked from one that has a Client, whose threads are missing here; start it with") == 2
