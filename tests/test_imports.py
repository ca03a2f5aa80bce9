"""The shape of the code: who imports whom, what the engine may name, how long files are, and what the package says of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import longspool
from longspool.method import registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "longspool"
FILES = sorted(SOURCE.rglob("*.py"))

CORE = {"errors", "values"}
SEATS = CORE | {"method", "roles", "view"}
MEMORY = SEATS | {"kernels", "plan"}
ENGINE = MEMORY | {"memory", "model"}
LLM = ENGINE | {"engine", "recipe", "report"}
ALLOWED = {
    "errors": set(),
    "values": {"errors"},
    "kernels": CORE,
    "method": CORE,
    "view": CORE | {"method"},
    "fitted": {"method", "view"},
    "roles": CORE | {"fitted", "method", "view"},
    "layerplan": SEATS,
    "plan": SEATS | {"layerplan"},
    "recipe": SEATS | {"plan"},
    "catalogue": SEATS,
    "memory": MEMORY,
    "model": MEMORY | {"memory"},
    "engine": ENGINE,
    "report": ENGINE | {"engine"},
    "llm": LLM,
    "bench": LLM | {"llm", "__init__"},
    "methods": SEATS | {"kernels"},
    "methods/__init__.py": {"catalogue"},
    "server": LLM | {"llm", "catalogue"},
    "cli": LLM | {"llm", "bench", "catalogue", "server", "__init__"},
    "__init__": LLM | {"llm", "catalogue"},
}


def module(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCE).with_suffix("").parts


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports of longspool, absolute within it: ("values", "rows")."""
    package = module(path)[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            start = (*base, *(node.module.split(".") if node.module else ()))
            yield from [start] if start else [(alias.name if there(alias.name) else "__init__",) for alias in node.names]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (tuple(name.split(".")[1:]) or ("__init__",) for name in names if name.split(".")[0] == "longspool")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def there(top: str) -> bool:
    """Whether longspool has such a module; else it is a name of its __init__."""
    return (SOURCE / top).is_dir() or (SOURCE / f"{top}.py").is_file()


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_one_way(path: Path) -> None:
    own, *rest = module(path)
    for target in imported(path):
        if target[0] == own and own != "methods":
            continue
        if own == "methods" and target[0] == "methods":
            assert target == ("methods", rest[0], "base"), f"{name(path)} imports {'.'.join(target)}; methods share their room's base only"
        else:
            assert target[0] in ALLOWED.get(name(path), ALLOWED[own]), f"{name(path)} imports {'.'.join(target)}"


def test_the_rule_sees_imports() -> None:
    assert ("memory",) in set(imported(SOURCE / "engine" / "engine.py"))
    assert ("methods", "evict", "base") in set(imported(SOURCE / "methods" / "evict" / "snapkv.py"))
    assert ("__init__",) in set(imported(SOURCE / "cli" / "main.py"))


@pytest.mark.parametrize("path", [p for p in FILES if module(p)[0] in ("engine", "memory", "plan", "roles", "view", "method")], ids=name)
def test_the_engine_names_no_method(path: Path) -> None:
    """Neither a name in the code nor a text that equals one, by which it could be told apart; a hint to the user may name an example,
    and torch has dtypes that are called as codecs are."""
    known = set(registry()) | {cls.__name__ for cls in registry().values()}
    used: set[str] = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch")):
                pass
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.alias(name=text) | ast.arg(arg=text) | ast.Constant(value=str(text)):
                used.add(text)
            case ast.ImportFrom(module=str(text)):
                used |= set(text.split("."))
    assert sorted(used & known) == []


def test_importing_is_cheap() -> None:
    code = (
        "import sys, longspool; longspool.PlanError; "
        "print(sorted({'torch', 'numba', 'numpy', 'transformers', 'triton', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names() -> None:
    assert sorted(longspool.__all__) == longspool.__all__
    for public in longspool.__all__:
        assert getattr(longspool, public).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        longspool.Nothing  # noqa: B018


def test_methods_lists_them_whatever_was_imported() -> None:
    """The folder of the same name must not hide the function."""
    code = (
        "import longspool; a = longspool.methods(); b = longspool.methods(); "
        "from longspool import methods; assert a == b == methods() and len(a) > 5"
    )
    for before in ("", "import longspool.methods.evict.snapkv; ", "from longspool.method import registry; registry(); "):
        subprocess.run([sys.executable, "-c", before + code], check=True)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short(path: Path) -> None:
    limit = {"methods": 120, "kernels": 500}.get(module(path)[0], 300)
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", FILES, ids=name)
def test_errors_are_caught_by_name(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
            assert not caught & {"Exception", "everything"}, f"line {node.lineno}"


def test_the_project_says_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == longspool.__version__
    assert longspool.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert project["scripts"] == {"longspool": "longspool.cli.main:main"}
    assert (
        "Apache" in project["license"]
        and "Apache License" in (ROOT / "LICENSE").read_text()
        and "Apache 2.0" in (ROOT / "README.md").read_text()
    )
    least = re.search(r">=(\d+\.\d+)", project["requires-python"])
    assert least is not None and f"Python {least[1]} or newer" in (ROOT / "CONTRIBUTING.md").read_text()
    assert f"sys.version_info < ({least[1].replace('.', ', ')})" in (ROOT / "Makefile").read_text()


def required(kind: str) -> set[str]:
    """The packages of the dependencies, or of an extra, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] if not kind else project["optional-dependencies"][kind]
    return {re.split(r"[^\w.-]", text)[0].lower().replace("-", "_") for text in listed}


def foreign(path: Path) -> set[str]:
    """The packages that a file imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"longspool"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_what_is_imported_is_required(path: Path) -> None:
    """A dependency, or of the extra that the file belongs to; Numba brings llvmlite."""
    extra = {"server": required("server"), "kernels": required("gpu") | {"llvmlite"}}
    assert not foreign(path) - required("") - extra.get(module(path)[0], set())
