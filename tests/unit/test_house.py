"""The house rules that a machine can check: who may import whom, and what the mutants say."""

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "api": {"api", "daemon", "stages", "optim"},
    "daemon": {"daemon", "stages", "optim", "proto"},
    "stages": {"stages"},
    "optim": {"optim"},
    "proto": {"proto"},
}
ON_THE_WIRE = {
    "stages/links/frame_codec.py",
    "stages/links/endpoint.py",
    "stages/links/hello.py",
}
"""The links' modules that know the messages: of stages/ these alone import headway.proto."""

FOR_PLUGINS: Final = "headway.stages.plugin_names"
"""It imports nothing, and every room may import it."""

IMPURE_IMPORTS = frozenset(
    {"asyncio", "datetime", "grpc", "logging", "os", "random", "secrets"}
    | {"socket", "structlog", "subprocess", "threading", "time", "torch"}
)
MOST_LINES: Final = 600
"""Of one file. What is longer is not read from end to end."""
LONGEST_FUNCTION: Final = 60


@cache
def source_files() -> tuple[str, ...]:
    """The product's modules and the benches, as paths from the root."""
    tops = ("api", "daemon", "stages", "optim", "bench")
    return tuple(sorted(path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py")))


def statements(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements of a block and of the blocks inside them: a tenth of the nodes of its tree."""
    for node in block:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, field, ()))


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Full names of everything a file imports, wherever in the file, for type checkers too."""
    names = set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@cache
def own_imports(file: str) -> frozenset[str]:
    """Which other files of the product or the benches a file imports."""
    known = set(source_files())
    paths = {f"{name.removeprefix('headway.').replace('.', '/')}.py" for name in imported_modules(ROOT / file)}
    elsewhere = {f"{folder}/{path}" for path in paths for folder in ("api", "bench")}
    return frozenset((paths | elsewhere) & known - {file})


def folder_imports() -> dict[str, set[str]]:
    """Folder to the other folders that its files import from; a folder inside another is one of its own."""
    found: dict[str, set[str]] = {}
    for file in source_files():
        folder = file.rpartition("/")[0]
        found.setdefault(folder, set()).update(other.rpartition("/")[0] for other in own_imports(file))
        found[folder].discard(folder)
    return found


def knots(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The groups of nodes that all reach each other."""
    reached = {node: reach(graph, node) for node in graph}
    groups = {tuple(sorted(o for o in there if node in reached[o])) for node, there in reached.items() if node in there}
    return [list(group) for group in sorted(groups)]


def reach(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    """The nodes that arrows lead to from one."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph[waiting.pop()] - found:
            found.add(node)
            waiting.append(node)
    return found


def pure_files() -> tuple[str, ...]:
    """The modules that call themselves pure."""
    docstrings = {file: ast.get_docstring(ast.parse((ROOT / file).read_text())) or "" for file in source_files()}
    return tuple(file for file, text in docstrings.items() if re.search(r"\bpure\b", text, flags=re.IGNORECASE))


def called_names(path: Path) -> set[str]:
    """Plain names that a file calls."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {called.id for called in calls if isinstance(called, ast.Name)}


def headway_rooms(path: Path) -> set[str]:
    """Which of the rooms a file imports from; what lies in `headway` itself is of api/."""
    named = (name for name in imported_modules(path) if name.startswith("headway."))
    parts = {name.split(".")[1] for name in named if not name.startswith(FOR_PLUGINS)}
    return {part if part in ALLOWED else "api" for part in parts}


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


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Imports lead from a folder to those below it and never back: it can be read without those above."""
    graph = folder_imports()
    between = {
        group: [f"{a} -> {b}" for a in group for b in sorted(graph[a] & set(group))]
        for group in map(tuple, knots(graph))
    }
    assert between == {}


def drawn_imports() -> dict[str, set[str]]:
    """The arrows between folders in the picture of docs/architecture.md."""
    picture = (ROOT / "docs/architecture.md").read_text().partition("flowchart TB\n")[2].partition("```")[0]
    labels = dict(re.findall(r"(\w+)\[([\w/]+)\]", picture))
    found: dict[str, set[str]] = {}
    for line in re.sub(r"\[[\w/]+\]", "", picture).splitlines():
        groups = [[labels.get(name.strip(), name.strip()) for name in group.split("&")] for group in line.split("-->")]
        for importing, imported in pairwise(groups):
            for name in importing:
                found.setdefault(_folder(name), set()).update(map(_folder, imported))
    return {folder: found.get(folder, set()) for folder in folder_imports()}


def _folder(name: str) -> str:
    return next(path for path in (name, f"daemon/{name}", f"stages/{name}") if (ROOT / path).is_dir())


def test_the_picture_of_the_folders_is_true() -> None:
    """Each import between folders is an arrow or a way of arrows in docs/architecture.md, and each arrow an import."""
    drawn = drawn_imports()
    real = {folder: imported - {"daemon", "stages"} for folder, imported in folder_imports().items()}
    folders = {folder for folder in real if folder.startswith(("daemon/", "stages/"))}
    missing = {folder: left for folder in folders if (left := real[folder] - reach(drawn, folder))}
    assert not missing, f"imported, but not drawn: {missing}"
    untrue = {folder: left for folder in drawn if (left := drawn[folder] - reach(real, folder))}
    assert not untrue, f"drawn, but not imported: {untrue}"


def test_a_circle_of_folders_is_found() -> None:
    """Three folders in a circle, one that only looks on."""
    graph: dict[str, Set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert knots(graph) == [["a", "b", "c"]]


def test_a_file_can_be_read_from_end_to_end() -> None:
    """No module of the product or the benches is longer than a reader reads."""
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in source_files()}
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}


def test_a_function_fits_a_screen() -> None:
    """No function of the product is longer than 60 lines, its docstring included."""
    lengths = {
        f"{file}::{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file in source_files()
        if not file.startswith("bench/")
        for node in statements(ast.parse((ROOT / file).read_text()).body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_every_folder_of_the_product_is_in_the_wheel() -> None:
    """A folder that pyproject.toml does not name is missing where people install it; a name without one ends pip."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    tops = ("api", "daemon", "optim", "proto", "stages")
    folders = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("__init__.py")}
    named = {name for name in listed if name not in ("headway.systemd", "headway.docs.examples", "headway.docs.jobs")}
    assert {".".join(("headway", *folder.parts)).replace("headway.api", "headway") for folder in folders} == named


def test_unit_tests_lie_where_the_code_lies() -> None:
    """Each folder of tests/unit has the name of a folder of the product, or of one that tests share."""
    unit = ROOT / "tests/unit"
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")} - {"."}
    assert {folder for folder in folders if not any((top / folder).is_dir() for top in (ROOT, ROOT / "tests"))} == set()


def test_no_test_imports_another_one() -> None:
    """What several tests need lies in tests/rigs; only a contract is imported, by the tests of another device."""
    tests = {path: imported_modules(path) for path in (ROOT / "tests").rglob("*.py")}
    found = {
        path.name: name for path, names in tests.items() for name in names if re.search(r"^tests\..*\.test_\w+$", name)
    }
    assert set(found.values()) <= {"tests.unit.stages.device.test_device_contract"}, found


@pytest.mark.parametrize("file", pure_files())
def test_what_calls_itself_pure_imports_nothing_impure(file: str) -> None:
    """A core that could see a clock, a socket or a tensor could not be simulated. What it imports counts too."""
    graph = {name: own_imports(name) for name in source_files()}
    for name in sorted({file} | reach(graph, file)):
        tops = {module.split(".")[0] for module in imported_modules(ROOT / name)}
        assert not tops & IMPURE_IMPORTS, name


def test_channels_are_opened_in_one_place() -> None:
    """A channel that is opened elsewhere would obey the environment's web proxy."""
    files = [file for file in source_files() if not file.startswith("bench/")]
    opening = [file for file in files if re.search(r"\b(in)?secure_channel\(", (ROOT / file).read_text())]
    assert opening == ["stages/sockets/shared_port.py"]


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
    specification = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    assert specification is not None
    assert specification.loader is not None
    runner = importlib.util.module_from_spec(specification)
    sys.modules["mutants_run"] = runner
    specification.loader.exec_module(runner)
    mutants = runner.read_mutants()
    assert len(mutants) >= 12
    for mutant in mutants:
        compile(mutant.applied_to((ROOT / mutant.file).read_text()), mutant.file, "exec")
        for test in mutant.test.split():
            if "::" in test:
                path, function = test.split("::")[0], test.split("::")[-1].split("[")[0]
                assert f"def {function}" in (ROOT / path).read_text(), f"{mutant.name}: {test}"
