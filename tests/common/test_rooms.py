"""The rooms of the code: who may import whom, and what is imported without torch."""

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
