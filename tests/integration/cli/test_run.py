"""`headway run` against the oracle, and across an interruption."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file


def losses(folder: Path) -> list[tuple[int, float]]:
    """(batch, loss) of a run's metrics, in the order of the lines."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["batch"], row["loss"]) for row in rows]


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor of a run's model: dtype and bytes, by name."""
    found: dict[str, tuple[str, bytes]] = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        found |= {name: (str(array.dtype), array.tobytes()) for name, array in load_file(file).items()}
    return found


@pytest.fixture(scope="module")
def plain(standing: Any) -> Path:
    """Return the plain loop's results for the job of this file."""
    code, _, err = standing.run("reference", str(standing.job(name="plain")), "--out", "plain")
    assert code == 0, err
    return Path(standing.folder / "plain")


@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_equals_the_reference_bit_for_bit(program: Any, plain: Path, num_nodes: int) -> None:
    """One job by the plain loop and by 1 or 2 nodes: equal losses, equal tensors, no process left; and its [report],
    which the plain loop's job has not, is written where it says.
    """
    job = program.job(min_nodes=num_nodes)
    with job.open("a") as more:
        more.write('\n[report]\njsonl = "also.jsonl"\ntensorboard = "runs"\n')
    code, out, err = program.run("run", str(job), "--nodes", str(num_nodes), "--out", "piped")
    assert code == 0, out + err
    piped = program.folder / "piped"
    assert len(losses(plain)) == 5
    assert losses(piped) == losses(plain)
    assert (program.folder / "also.jsonl").read_bytes() == (piped / "metrics.jsonl").read_bytes()
    assert len([*(program.folder / "runs").rglob("*tfevents*")]) == 1
    assert tensors(piped) == tensors(plain)
    assert tensors(plain)
    assert program.leftovers() == []


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped(program: Any, wait_until: Callable[..., None]) -> None:
    """Ctrl-C in the middle of a run, then the same command: the losses and tensors of an undisturbed one."""
    job = program.job(batches=400)
    assert program.run("reference", str(job), "--out", "plain")[0] == 0
    first = program.start("run", str(job), "--nodes", "2", "--out", "piped", "--json")
    assert first.stdout is not None
    for line in first.stdout:
        if (json.loads(line)["batch"] or 0) >= 20:
            break
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=100)
    assert first.returncode == 130, err
    assert program.leftovers() == []
    code, _, err = program.run("run", str(job), "--nodes", "2", "--out", "piped")
    assert code == 0, err
    assert losses(program.folder / "piped") == losses(program.folder / "plain")
    assert tensors(program.folder / "piped") == tensors(program.folder / "plain")
    generations = [
        json.loads(line)["generation"] for line in (program.folder / "piped" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(set(generations)) >= 2
