"""The direction of imports: a module may import only from its own row of design.md's table or above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "foredraft"
ROWS = (
    ("errors", "config"),
    ("sampling",),
    ("kv",),
    ("models",),
    ("draft",),
    ("verify",),
    ("engine",),
    ("backends",),
    ("measure",),
    ("train",),
    ("serve",),
    ("cli",),
)
LEVELS = {name: level for level, row in enumerate(ROWS) for name in row}
SURFACE = "foredraft"  # the package itself, which offers the public names and may import them from anywhere


def imported_modules(source: str, module: str) -> list[str]:
    """Absolute names of what a module imports from the package, in functions and type checks too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, [parent, node.module]))
            # `from foredraft import engine` names a package, `from foredraft import __version__` does not.
            names += (
                [f"{origin}.{alias.name}" if alias.name in LEVELS else origin for alias in node.names]
                if origin == SURFACE
                else [origin]
            )
    return [name for name in names if name.split(".")[0] == SURFACE]


def wrong_imports(source: str, module: str) -> list[str]:
    """The imports of a module that point downwards, or at the public surface that stands on it."""
    own = level_of(module)
    return [name for name in imported_modules(source, module) if level_of(name) > own]


def level_of(module: str) -> int:
    parts = module.split(".")
    if len(parts) == 1:
        return LEVELS["cli"]  # `foredraft` stands on everything but the command line, which may read its version
    return LEVELS[parts[1]]


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [SURFACE, *path.relative_to(PACKAGE).with_suffix("").parts]
        found.append((".".join(part for part in parts if part != "__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_upwards(module: str, path: Path) -> None:
    assert wrong_imports(path.read_text(encoding="utf-8"), module) == []


def test_every_package_has_a_row() -> None:
    found = {module.split(".")[1] for module, _ in modules() if "." in module}
    assert found <= set(LEVELS)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from foredraft.engine.llm import LLM", ["foredraft.engine.llm"]),
        ("import foredraft.cli.main", ["foredraft.cli.main"]),
        ("from foredraft import serve", ["foredraft.serve"]),
        ("from foredraft import LLM", ["foredraft"]),
        ("from ..engine.step import Engine", ["foredraft.engine.step"]),
        ("def f():\n    from foredraft.engine import step", ["foredraft.engine"]),
        ("if TYPE_CHECKING:\n    from foredraft.measure.bench import run", ["foredraft.measure.bench"]),
        ("from foredraft.draft.proposal import DraftProposal\nfrom .token import verify\nimport torch", []),
    ],
)
def test_the_check_finds_wrong_imports(source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, "foredraft.verify.verification") == wrong
