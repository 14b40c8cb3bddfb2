"""Scripts that no other test runs, many of which need a GPU: do they still fit the package?"""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for folder in ("benchmarks", "scripts", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> list[tuple[str, str]]:
    """Each module of Solera's that is imported from, with the name that is taken from it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "solera"
        for each in node.names
    ]


def has(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("solera")  # a package that is installed on a GPU only
    of_package = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    return of_package or hasattr(found, name)


def test_there_are_scripts_that_use_the_package():
    assert sum(bool(imported(path)) for path in SCRIPTS) > 30


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_takes_from_the_package_is_there(path):
    assert [f"{module}.{name}" for module, name in imported(path) if not has(module, name)] == []
