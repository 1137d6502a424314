"""Wheels of a job's own code: how they are read and tried, and one line for each thing that is wrong with one."""

import hashlib
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.preview import equal_nodes, preview
from headway.daemon.jobs import plugin_trial, plugins
from headway.daemon.jobs.job import DataSpec, JobSpec, PluginsSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.plugin_trial import tried
from headway.daemon.jobs.plugins import import_plugins, with_plugins
from headway.daemon.plan.layer_costs import layer_costs
from headway.optim.spec import OptimSpec
from headway.stages.data.shard_index import read_index
from headway.stages.model.decoder import build_layer
from headway.stages.plugin_names import PluginError

JOB = """
[job]
name = "x"
[model]
num_hidden_layers = 2
hidden_size = 16
intermediate_size = 32
num_attention_heads = 2
num_key_value_heads = 1
[optim]
matrices = {{ name = "{module}:Own", settings = {settings} }}
[plugins]
wheel = "{module}.py"
"""
OPTIMIZER = """
import torch
class Own(torch.optim.Optimizer):
    def __init__(self, params, *, lr, weight_decay, rank=1):
        super().__init__(params, {"lr": lr})
        self.own = 0
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            STEP
"""
FAULTS = {
    "raises": ("raise KeyError('left')", "KeyError: 'left' (raises.py:10)"),
    "babbles": ("raise ValueError('x' * 10**6)", f"ValueError: {'x' * 300} (babbles.py:10)"),
    "mute": ("raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})", "Mute: <exception str() failed> (mute"),
    "infinite": ("weight.div_(0)", "not finite"),
    "replaces": ("weight.data = weight - weight.grad", "replaced the weights; it has to change them in place"),
    "remembers": (
        "self.own += weight is self.param_groups[0]['params'][0]; weight.add_(weight.grad, alpha=self.own)",
        "steps otherwise when it is made anew",
    ),
    "neighbours": ("weight.add_(len(self.param_groups[0]['params']))", "steps a parameter otherwise when it is alone"),
    "draws": ("weight.add_(torch.randn_like(weight))", "is not deterministic"),
    "list": ("state['seen'] = [1]", "keeps a list as `seen`; only tensors"),
    "group": ("self.param_groups[0]['k'] = 1", "changes its param_groups in a step"),
}


LOSS = "import torch\ndef Own(logits, targets, mean_tokens, rank=1):\n    "
HEADS = {"loss": LOSS, "source": "def Own(rank=1):\n    "}
BLOCK = """
import torch
class Own(torch.nn.Module):
    def __init__(self, model, *, rank=1):
        super().__init__()
        self.up, self.down = torch.nn.Linear(model.hidden_size, 40), torch.nn.Linear(40, model.hidden_size, bias=False)
        INIT
    def forward(self, hidden):
        FORWARD
"""
ANSWER = "return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))"
PARTS_FAULTS = {
    "rows": ("loss", "return logits.float().sum((1, 2))", "returns float32 [2], and has to return a float32 tensor []"),
    "halves": ("loss", "return logits.bfloat16().sum()", "returns bfloat16 [], and has to"),
    "none": ("loss", "return None", "returns a NoneType, and has to"),
    "no_graph": ("loss", "return logits.float().sum().detach()", "RuntimeError"),
    "nan": ("loss", "return logits.float().sum() / 0 * 0", "makes a loss or a gradient that is not finite"),
    "randomly": ("loss", "return (logits.float() * torch.rand(())).sum()", "is not deterministic"),
    "narrower": ("block", ("", "return self.up(hidden)"), "returns float32 [4, 128, 40] for float32 [4, 128, 16]"),
    "unused": ("block", ("self.more = torch.nn.Linear(2, 2)", ANSWER), "does not use more.weight"),
    "buffer": ("block", ("self.register_buffer('b', torch.zeros(1))", ANSWER), "has a buffer, b"),
    "sentences": ("source", "yield 'text'", "yields a str, and a document is bytes or a sequence of token numbers"),
    "large": ("source", "yield [1, 256]", "yields a token outside the vocabulary of 256"),
    "endless": ("source", "while True: yield b'ab'", "yields more than 64 tokens"),
    "breaks": ("source", "yield b'ab'; yield 1 / 0", "ZeroDivisionError: division by zero (breaks.py:2)"),
    "drops": ("block", ("self.drop = torch.nn.Dropout(0.5)", "return self.drop(" + ANSWER[7:] + ")"), "not determin"),
    "counts": (
        "block",
        ("self.calls = Own.calls = getattr(Own, 'calls', 0) + 1", ANSWER + " * self.calls"),
        "is not deterministic: it gives other bits a second time",
    ),
    "foresees": ("block", ("", ANSWER + " + hidden.mean(1, keepdim=True)"), "lets a token see those after it"),
    "logs": ("block", ("", ANSWER + ".log()"), "makes numbers that are not finite"),
    "leaves": ("block", ("", "raise SystemExit(1)"), "SystemExit: 1 (leaves.py:9)"),
    "values": ("block", ("", "return hidden * hidden.sum().item()"), "(values.py:9)"),
}


@pytest.fixture(autouse=True)
def path_of_imports() -> Iterator[None]:
    """Imports of a test end with it."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def job(folder: Path, module: str, text: str, *, settings: str = "{}") -> JobSpec:
    """A job with a module, as `with_plugins` leaves it before the trial."""
    (folder / f"{module}.py").write_text(text)
    spec = parse_job(JOB.format(module=module, settings=settings))
    wheel = plugins._read_wheel(folder / f"{module}.py", "job.toml")
    sha256 = hashlib.sha256(wheel).hexdigest()
    known = replace(spec.plugins, sha256=sha256, data=plugins._as_data(wheel, folder / sha256))
    return replace(spec, plugins=known)


@pytest.mark.parametrize(("module", "step", "line"), [(name, *row) for name, row in FAULTS.items()])
def test_a_step_that_breaks_a_rule_is_refused_by_name(tmp_path: Path, module: str, step: str, line: str) -> None:
    """One line names the plug-in and the rule, before any node sees the job."""
    fault = tried(job(tmp_path, module, OPTIMIZER.replace("STEP", step)), tmp_path / "data").fault
    assert fault.startswith(f"plug-in {module}:Own: ")
    assert line in fault
    assert "\n" not in fault


def of_kind(folder: Path, module: str, kind: str, text: object) -> JobSpec:
    """A job whose loss, block or source is `Own` of a module."""
    known = job(folder, module, HEADS[kind] + str(text) if kind in HEADS else own_block(text))
    key = {"loss": "train.loss", "block": "model.block", "source": "data.source"}[kind]
    return known.with_values({key: f"{module}:Own", "optim.matrices": OptimSpec().matrices})


def own_block(text: object) -> str:
    """The text of a block: what its constructor and its forward do."""
    assert isinstance(text, tuple)
    return BLOCK.replace("INIT", text[0]).replace("FORWARD", text[1])


@pytest.mark.parametrize(("module", "kind", "text", "line"), [(name, *row) for name, row in PARTS_FAULTS.items()])
def test_a_loss_a_block_or_a_source_that_breaks_a_rule_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, kind: str, text: object, line: str
) -> None:
    """Another shape or dtype than the rest expects, no gradient, other bits a second time, tokens without end."""
    monkeypatch.setattr(plugin_trial, "MOST_TOKENS", 64)
    fault = tried(of_kind(tmp_path, module, kind, text), tmp_path / "data").fault
    assert fault.startswith(f"plug-in {module}:Own: ")
    assert line in fault
    assert "\n" not in fault


def test_the_plan_counts_what_the_block_computes_and_keeps(tmp_path: Path) -> None:
    """Two products and their weights; of each token its input once for up, what silu and down keep: 16, 40 and 40."""
    spec = of_kind(tmp_path, "counted", "block", ("", ANSWER))
    trial = tried(spec, tmp_path / "data")
    assert not trial.fault
    known = {"block_flops": trial.block_flops, "block_values": trial.block_values}
    spec = replace(
        spec,
        model=replace(spec.model, block_shapes=trial.block_shapes),
        plugins=replace(spec.plugins, **known),  # type: ignore[arg-type]
    )
    block, tokens = layer_costs(spec)[1], spec.train.microbatch_size * spec.train.sequence_length
    assert block.num_parameters == 40 * 16 + 40 + 16 * 40
    assert block.forward_flops == 2 * tokens * 2 * 40 * 16
    assert block.activation_bytes == 4 * tokens * (16 + 40 + 40)
    again = layer_costs(spec, "block")[1]
    assert again.activation_bytes == 4 * tokens * 16
    assert again.backward_flops == block.backward_flops + block.forward_flops


def test_nothing_runs_that_was_not_imported_from_a_wheel(tmp_path: Path) -> None:
    """A record that names installed code and no hash of a wheel gets nothing called, whoever has written it."""
    spec = of_kind(tmp_path, "unittest", "block", ("", ANSWER))
    spec = replace(spec, model=replace(spec.model, block="unittest:main"), plugins=PluginsSpec(wheel="x.whl"))
    import_plugins(spec, tmp_path)
    with pytest.raises(PluginError, match="plug-in unittest:main: is not imported here"):
        build_layer("block.0", spec.model)


def test_what_cannot_be_imported_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not there, a class that is not there, a setting that is unknown, an import that hangs."""
    lines = {
        "needs": ("import no_such_package", "needs no_such_package, which is not installed on this machine"),
        "empty": ("", "AttributeError: module 'empty' has no attribute 'Own'"),
        "other": ("Own = lambda params, **settings: []", "makes a list, which is no torch.optim.Optimizer"),
        "hangs": ("while True: pass", "TimeoutError: its import takes longer than 0.1 s"),
        "json": ("Own = dict", "is another module of this machine, which goes before the wheel's; rename it"),
    }
    monkeypatch.setattr(plugins, "IMPORT_S", 0.1)
    for module, (text, line) in lines.items():
        assert line in tried(job(tmp_path, module, text), tmp_path / "data").fault, module
    unknown = job(tmp_path, "unknown", OPTIMIZER.replace("STEP", "pass"), settings="{ rnk = 2 }")
    assert "unexpected keyword argument 'rnk'" in tried(unknown, tmp_path / "data").fault


def test_code_that_ends_its_process_is_refused_by_how_it_ended(tmp_path: Path) -> None:
    """It says nothing itself, so the trial does."""
    for module, text, line in (("leaves", "os._exit(7)", "status 7"), ("dies", "os.kill(os.getpid(), 9)", "SIGKILL")):
        (tmp_path / f"{module}.py").write_text(f"import os\n{text}\n")
        spec = parse_job(JOB.format(module=module, settings="{}"))
        with pytest.raises(ConfigError, match=rf"plug-in {module}.py: its trial .* {line}$"):
            with_plugins(spec, job_file=tmp_path / "job.toml", cache_dir=tmp_path)


def test_a_trial_is_neither_waited_for_nor_kept_beyond_its_end(tmp_path: Path) -> None:
    """It leaves a process behind that has its streams, and says more than anybody wants in memory."""
    text = "import os, sys, time\nif not os.fork():\n    time.sleep(60)\n    os._exit(0)\n"
    text += "sys.stdout.write('x' * (8 << 20))\nsys.stderr.write('y' * (8 << 20) + '\\nthe end\\n')\n"
    spec, began = job(tmp_path, "prints", f"{text}sys.stderr.flush()\nos._exit(7)\n"), time.monotonic()
    tracemalloc.start()
    try:
        fault = plugins._tried(spec, tmp_path / "data").fault
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert fault == "plug-in prints.py: its trial ended with exit status 7: the end"
    assert time.monotonic() - began < 60


def test_another_wheel_than_the_jobs_is_refused(tmp_path: Path) -> None:
    """By the job file's own hash when it is read; and where it is imported, nothing of other bytes runs."""
    spec = job(tmp_path, "altered", "raise SystemExit")
    other = replace(spec, plugins=replace(spec.plugins, sha256="0" * 64))
    with pytest.raises(PluginError, match=r"plug-in altered.py: the file in .* is .*, not 000000000000…"):
        import_plugins(other, Path(spec.plugins.data.source))
    with pytest.raises(ConfigError, match=r"job.toml:plugins.sha256: altered.py is .*…, not 000000000000…"):
        with_plugins(other, job_file=tmp_path / "job.toml", cache_dir=tmp_path)


@pytest.mark.parametrize(("name", "line"), [("text.whl", "is neither a wheel"), ("fast.whl", "compiled code, a.so")])
def test_what_is_no_wheel_of_python_is_refused(tmp_path: Path, name: str, line: str) -> None:
    """A text, and compiled code, which no import from a wheel finds."""
    (tmp_path / "text.whl").write_text("no wheel")
    with zipfile.ZipFile(tmp_path / "fast.whl", "w") as archive:
        archive.writestr("a.so", b"")
    spec = parse_job(JOB.format(module="m", settings="{}"))
    spec = replace(spec, plugins=replace(spec.plugins, wheel=name))
    with pytest.raises(ConfigError, match=line):
        with_plugins(spec, job_file=tmp_path / "job.toml", cache_dir=tmp_path)


def test_the_plan_counts_what_the_optimizer_keeps(tmp_path: Path) -> None:
    """A factor of each side in float64, as Shampoo has it: rows² + columns² of 8 bytes, for each matrix."""
    (tmp_path / "factors.py").write_text(
        OPTIMIZER.replace(
            "STEP",
            "[state.setdefault(str(n), torch.zeros(n, n, dtype=torch.float64, device=weight.device))"
            " for n in weight.shape]",
        )
    )
    spec = parse_job(JOB.format(module="factors", settings="{}").replace("[optim]", "[optim]\nerror_feedback = 0.0"))
    spec = with_plugins(spec, job_file=tmp_path / "job.toml", cache_dir=tmp_path)
    block = layer_costs(spec)[1]
    shapes = [(16, 16), (8, 16), (8, 16), (16, 16), (32, 16), (32, 16), (16, 32)]
    of_matrices = sum(8 * sum(side**2 for side in {*shape}) for shape in shapes)
    assert block.optimizer_bytes == of_matrices + 2 * 16 * 2 * 4, "AdamW keeps two tensors of each norm"


def test_the_plan_says_that_an_own_loss_is_counted_as_another() -> None:
    """What it keeps for its backward is not known before it is computed."""
    spec = parse_job(JOB.format(module="m", settings="{}"))
    spec = spec.with_values({"train.loss": "m:Own", "optim.matrices": OptimSpec().matrices})
    found = preview(spec, equal_nodes(1))[0]
    assert "What m:Own keeps in memory is counted as for a cross entropy." in found.lines


def test_a_source_runs_once_and_leaves_the_nodes_no_code(tmp_path: Path) -> None:
    """Its documents are one stream, as data with a hash. The job has no wheel any more, and is the same again."""
    (tmp_path / "yields.py").write_text("def Own(text):\n    yield text.encode()\n    yield [33, 10]\n")
    spec = parse_job(JOB.format(module="yields", settings="{}"))
    spec = replace(spec, optim=OptimSpec(), data=DataSpec(source="yields:Own", settings=(("text", "ab"),)))
    first, second = (with_plugins(spec, job_file=tmp_path / "job.toml", cache_dir=tmp_path) for _ in range(2))
    assert first == second
    assert (first.plugins, first.data.settings) == (PluginsSpec(), ())
    folder = Path(first.data.source)
    assert (folder / read_index(folder).shards[0].file).read_bytes() == b"ab!\n"
