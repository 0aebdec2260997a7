"""The import directions between rooms, and what each process may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "protocols", "serve_app", "cluster")
ALLOWED = {
    "engine": {"engine"},
    "protocols": {"protocols", "engine.types"},
    "cluster": {"cluster", "engine"},
    "serve_app": {"serve_app", "cluster", "protocols", "engine"},
}
FOREIGN = {
    "engine": {"ray", "starlette", "fastapi", "uvicorn"},
    "protocols": {"ray", "torch", "transformers", "starlette", "fastapi", "asyncio.subprocess", "socket"},
}
TORCH_ROOMS = (
    "engine/models",
    "engine/attention",
    "engine/execution",
    "engine/kernels",
    "engine/parallel/collectives.py",
    "engine/speculation/learned.py",
    "engine/speculation/verify.py",
)
TORCH_FREE_MODULES = (
    "engine.engine",
    "engine.config",
    "engine.prepared",
    "engine.scheduler.scheduler",
    "engine.cache.index",
    "engine.text.output",
    "engine.text.lowering",
    "engine.syntax",
    "engine.grammar",
    "engine.recipes.catalog",
    "engine.parallel.ranks",
    "engine.parallel.step_link",
    "protocols.chat.decode",
    "protocols.completions.encode",
    "protocols.messages.decode",
    "protocols.responses.encode",
    "serve_app.app",
    "serve_app.engine_replica",
    "serve_app.ingress.openai",
    "serve_app.preprocessor",
)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every imported module, with whether the import runs when the module is imported."""
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, id(node) not in lazy
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in lazy


def within(module: str, roots: set[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_import_directions(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for module, _ in imports(ast.parse(path.read_text())):
        if module.split(".")[0] in PACKAGES and module != "engine":
            assert within(module, ALLOWED[package]), f"{package} may not import {module}"
        assert not within(module, FOREIGN.get(package, set())), f"{package} may not import {module}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_only_where_it_computes(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if name.startswith(TORCH_ROOMS):
        return
    for module, at_import in imports(ast.parse(path.read_text())):
        if at_import:
            assert not within(module, {"torch", "transformers"}), f"{name} loads {module} when imported"


def test_torch_free_processes_load_no_torch() -> None:
    """What the ingress, preprocessor and scheduler processes import brings in neither torch nor transformers."""
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE_MODULES!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_size_and_opening(path: Path) -> None:
    """A module opens by saying what it owns, and stays readable in one sitting."""
    text = path.read_text()
    if not text.strip():
        return
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path.name} needs an opening docstring"
    assert text.count("\n") <= 700, f"{path.name} overflows: split it by noun"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 80, f"{node.name} is too long"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in {path.name}:{node.lineno}"


def test_no_environment_reads_in_the_engine_and_protocols() -> None:
    for path in sources():
        if path.relative_to(ROOT).parts[0] in ("engine", "protocols"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                    raise AssertionError(f"{path.name}:{node.lineno} reads the environment")
