"""The rooms of the code: who may import whom, what is imported without torch, and sizes."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each imports itself and what is above. In this order: what is further down may not be imported.
ROOMS = (
    "common",
    "models",
    "parallel",
    "planner",
    "training.config",
    "training.data",
    "training.optimizers",
    "training.checkpoint",
    "training.run",
    "training",
    "train_llm",
    "recipes",
    "launch",
    "benchmarks",
    "tests",
)


def room_of(module: str) -> str | None:
    """The room of a module; None for a library."""
    parts = module.split(".")
    names = (".".join(parts[:2]), parts[0])
    return next((name for name in names if name in ROOMS), None)


def imports_of(file: Path) -> set[str]:
    """Modules that a file names in imports, also within functions."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # What is imported from a package may be a module.
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def product() -> list[Path]:
    top = [ROOT / room.replace(".", "/") for room in ROOMS[:-1] if "." not in room]
    files = [file for folder in top for file in folder.rglob("*.py")]
    return [ROOT / "train_llm.py", *files]


def test_imports_lead_upwards():
    wrong = []
    for file in product():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        here = ROOMS.index(room_of(name))
        for module in imports_of(file):
            room = room_of(module)
            # Two exceptions: the benchmarks use the harness of the tests.
            if room and ROOMS.index(room) > here and (here, room) != (len(ROOMS) - 2, "tests"):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_what_says_that_it_is_torch_free_is():
    """The docstrings' word for it, of all modules in one process."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in product()
        if "Torch-free" in (ast.get_docstring(ast.parse(file.read_text())) or "")
    ]
    assert {"models.weights", "parallel.rules", "planner.time", "training.start"} < set(modules)
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_sizes():
    """No file, function or list of parameters of the product is longer than CONTRIBUTING.md says.

    The benchmarks, which no run uses, may be longer.
    """
    too_long = []
    for file in product():
        place = file.relative_to(ROOT)
        if place.parts[0] == "benchmarks":
            continue
        text = file.read_text()
        if (lines := len(text.splitlines())) > 400:
            too_long.append(f"{place}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name, lines = f"{place}: {node.name}", node.end_lineno - node.lineno + 1
            if lines > 60:
                too_long.append(f"{name} has {lines} lines")
            parts = node.args
            every = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg]
            names = {part.arg for part in every if part} - {"self", "cls"}
            if len(names) > 8:
                too_long.append(f"{name} has {len(names)} parameters")
    assert not too_long
