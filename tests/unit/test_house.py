"""The house rules that a machine can check: who may import whom, and what the mutants' patches say."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "daemon": {"daemon", "stages", "optim", "proto"},
    "stages": {"stages"},
    "optim": {"optim"},
    "proto": {"proto"},
}
ON_THE_WIRE = {
    "stages/links/grpc/frame_codec.py",
    "stages/links/grpc/frame_layout.py",
    "stages/links/grpc/endpoint.py",
    "stages/links/collective/endpoint.py",
    "stages/links/collective/rendezvous.py",
    "stages/links/grpc/reach_answer.py",
}
"""The links' modules that know the messages: of stages/ these alone import headway.proto."""

PURE = (
    "daemon/chaos/fault_schedule.py",
    "daemon/coordination/accounting.py",
    "daemon/coordination/actions.py",
    "daemon/situation/situation.py",
    "daemon/coordination/claims.py",
    "daemon/view/cluster_view.py",
    "daemon/coordination/commands.py",
    "daemon/coordination/conditions.py",
    "daemon/coordination/coordinator.py",
    "daemon/coordination/fair_share.py",
    "daemon/leader/stale_checkpoints.py",
    "daemon/coordination/link_proofs.py",
    "daemon/situation/standstill.py",
    "daemon/situation/loss.py",
    "daemon/coordination/queue_order.py",
    "daemon/view/settling.py",
    "daemon/view/usage.py",
    "daemon/chaos/checker.py",
    "daemon/history/events.py",
    "daemon/records/lineage.py",
    "daemon/agent/steps_due.py",
    "daemon/agent/steps.py",
    "daemon/agent/copy_steps.py",
    "daemon/agent/layer_sources.py",
    "daemon/agent/link_steps.py",
    "daemon/agent/lost_links.py",
    "daemon/agent/local_state.py",
    "daemon/agent/assignment.py",
    "daemon/reach/reach_target.py",
    "daemon/agent/state_steps.py",
    "daemon/costs/blocked_ways.py",
    "daemon/planning/cluster_plan.py",
    "daemon/costs/connections.py",
    "daemon/costs/device_order.py",
    "daemon/costs/distance.py",
    "daemon/costs/layer_costs.py",
    "daemon/costs/link_choice.py",
    "daemon/preview/nodes_file.py",
    "daemon/planning/order_search.py",
    "daemon/planning/pace_search.py",
    "daemon/planning/pipeline_cut.py",
    "daemon/planning/plan_assembly.py",
    "daemon/planning/plan_links.py",
    "daemon/preview/plan_simulation.py",
    "daemon/planning/planner.py",
    "daemon/planning/predicted_time.py",
    "daemon/preview/preview.py",
    "daemon/costs/profiles.py",
    "daemon/costs/replica_shares.py",
    "daemon/costs/stage_costs.py",
    "daemon/results/measured_pipeline.py",
    "daemon/results/pipeline_trace.py",
    "daemon/worker/session.py",
    "stages/schedule/schedule.py",
    "stages/schedule/simulator.py",
)
IMPURE_IMPORTS = frozenset(
    ("asyncio", "datetime", "grpc", "logging", "os", "random", "secrets", "structlog", "threading", "time", "torch")
)


def imported_modules(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def called_names(path: Path) -> set[str]:
    """Plain names that a file calls."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {called.id for called in calls if isinstance(called, ast.Name)}


def headway_rooms(path: Path) -> set[str]:
    """Which of daemon, stages, optim, proto a file imports from."""
    return {name.split(".")[1] for name in imported_modules(path) if name.startswith("headway.")}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_only_what_they_may(room: str) -> None:
    """Every file of a room imports from the rooms that the architecture allows it, and from nowhere else."""
    for path in (ROOT / room).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if "_pb2" in name:
            continue
        allowed = ALLOWED[room] | ({"proto"} if name in ON_THE_WIRE else set())
        assert headway_rooms(path) <= allowed, name
        assert not {"tests", "bench"} & {module.split(".")[0] for module in imported_modules(path)}, name


@pytest.mark.parametrize("name", PURE)
def test_pure_cores_import_nothing_impure(name: str) -> None:
    """A core that could see a clock, a socket or a tensor would not be simulable: it imports none of them."""
    tops = {module.split(".")[0] for module in imported_modules(ROOT / name)}
    assert not tops & IMPURE_IMPORTS


def test_the_second_oracle_shares_no_code() -> None:
    """It imports Python, numpy, torch and itself: nothing of Headway, not even through a module loaded by name."""
    files = list((ROOT / "tests/second_oracle").rglob("*.py"))
    assert len(files) > 5
    for path in files:
        modules = imported_modules(path)
        tops = {module.split(".")[0] for module in modules}
        assert tops <= (sys.stdlib_module_names - {"importlib", "runpy"}) | {"numpy", "torch", "tests"}, path
        of_tests = {module for module in modules if module.split(".")[0] == "tests"}
        assert all(module.startswith("tests.second_oracle.") for module in of_tests), path
        assert not {"exec", "eval", "__import__"} & called_names(path), path


def test_every_mutant_applies_and_names_its_test() -> None:
    """Each planted bug still fits the code, and the test that is to catch it exists."""
    if not (ROOT / ".git").exists():
        pytest.skip("patches are checked against a checkout")
    specification = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    assert specification is not None
    assert specification.loader is not None
    runner = importlib.util.module_from_spec(specification)
    sys.modules["mutants_run"] = runner
    specification.loader.exec_module(runner)
    mutants = runner.read_mutants()
    assert len(mutants) >= 12
    for mutant in mutants:
        checked = subprocess.run(
            ["git", "apply", "--check", "--recount", str(mutant.path)], cwd=ROOT, capture_output=True, text=True
        )
        assert checked.returncode == 0, f"{mutant.name}: {checked.stderr}"
        for test in mutant.test.split():
            if "::" in test:
                path, function = test.split("::")[0], test.split("::")[-1].split("[")[0]
                assert f"def {function}" in (ROOT / path).read_text(), f"{mutant.name}: {test}"
