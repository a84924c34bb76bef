# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that a machine can see: levels, torch-free packages, sizes, imports, docstrings."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "headrace"
FILES = sorted(ROOT.rglob("*.py"))

LEVEL = {
    "errors": -1, "envs": -1, "logger": -1, "utils": 0,
    "config": 1, "sampling_params": 1, "kv_cache_retention": 1, "outputs": 1,
    "core": 2, "structured": 2, "parsers": 2, "kernels": 2, "distributed": 2,
    "attention": 3, "quantization": 3,
    "layers": 4,
    "models": 5,
    "lora": 6, "speculative": 6, "disagg": 6,
    "worker": 7,
    "engine": 8,
    "server": 9, "bench": 9, "eval": 9, "calibrate": 9, "build": 9,
    "cli": 10, "integrations": 10,
}  # fmt: skip
TORCH_FREE = {
    "utils", "errors", "envs", "logger", "config", "sampling_params", "kv_cache_retention", "outputs", "core",
    "structured", "parsers",
    "engine", "server", "bench", "cli",
}  # fmt: skip
# An optional dependency is imported by its adapter alone.
ADAPTERS = {
    "triton": "kernels/",
    "flashinfer": "attention/flashinfer.py",
    "xgrammar": "structured/xgrammar.py",
    "gguf": ("utils/gguf_meta.py", "utils/gguf_file.py", "quantization/gguf.py", "models/gguf.py"),
    "huggingface_hub": "utils/hub.py",
}
# Late binding by name, each file with its reason.
MAY_IMPORTLIB = {
    "__init__.py": "the public names",
    "cli/main.py": "the commands",
    "models/registry.py": "the models",
    "engine/executor.py": "the worker",
    "kernels/op.py": "implementations that need Triton",
    "attention/choose.py": "backends that need Triton or a library",
    "utils/lazy.py": "optional dependencies",
}
# Modules of packages that our dependencies require themselves; torch with CUDA brings triton.
COME_WITH = {"annotated_types", "pydantic_core", "starlette", "triton"}
WITHOUT_DEFAULT = {"model"}
MAX_FILE, MAX_FUNCTION, MAX_MODEL_FILE = 600, 80, 80
# The shared parts under models/; every other file there is one model and the difference from its neighbour.
SHARED_MODEL_FILES = {"__init__.py", "base.py", "registry.py", "weights.py", "gguf.py", "kv_scales.py"}


def package_of(path: Path) -> str:
    """`core` for headrace/core/scheduler.py, `errors` for headrace/errors.py."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.fixture(params=FILES, ids=lambda p: str(p.relative_to(ROOT)))
def source(request: pytest.FixtureRequest) -> tuple[Path, str, ast.Module]:
    text = request.param.read_text()
    return request.param, text, ast.parse(text)


def test_a_module_imports_lower_levels_only(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    here = package_of(path)
    if here in ("__init__", "__main__"):
        return
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] != "headrace" or len(parts) == 1:
            continue
        there = parts[1]
        assert there == here or LEVEL[there] < LEVEL[here], f"{here} (level {LEVEL[here]}) must not import {name}"


def test_kernels_know_nothing_of_headrace(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    if package_of(path) == "kernels":
        for name in imports(tree):
            assert not name.startswith("headrace") or name.startswith("headrace.kernels"), name


def test_the_control_plane_does_not_import_torch(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    if package_of(path) in TORCH_FREE:
        for name in imports(tree):
            assert name.split(".")[0] not in ("torch", "triton"), f"{package_of(path)} must not import {name}"


def test_an_optional_dependency_has_one_adapter(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    here = str(path.relative_to(ROOT))
    for name in imports(tree):
        adapter = ADAPTERS.get(name.split(".")[0])
        assert adapter is None or here.startswith(adapter), f"{here} must not import {name}; {adapter} does"


def test_nothing_is_imported_inside_a_function(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for node in ast.walk(function):
            assert not isinstance(node, (ast.Import, ast.ImportFrom)), f"{path}:{node.lineno} imports in a function"
    if "importlib" in set(imports(tree)):
        here = str(path.relative_to(ROOT))
        assert here in MAY_IMPORTLIB, f"{here} uses importlib; late binding has its places: {MAY_IMPORTLIB}"


def test_files_and_functions_stay_small(source: tuple[Path, str, ast.Module]) -> None:
    path, text, tree = source
    lines = text.count("\n")
    is_model = package_of(path) == "models" and path.name not in SHARED_MODEL_FILES
    limit = MAX_MODEL_FILE if is_model else MAX_FILE
    assert lines <= limit, f"{path} has {lines} lines; split it (limit {limit})"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{path}:{node.lineno} {node.name} has {length} lines (limit {MAX_FUNCTION})"


def test_arguments_are_typed(source: tuple[Path, str, ast.Module]) -> None:
    path, _, tree = source
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
            # Triton kernels take pointers and compile-time constants; their docstring says what they are.
            kernel = any("triton" in ast.unparse(d) or "jit" in ast.unparse(d) for d in node.decorator_list)
            assert kernel or not bare, f"{path}:{node.lineno} {node.name}: untyped {bare}"


def test_no_prints_and_no_probing(source: tuple[Path, str, ast.Module]) -> None:
    path, text, tree = source
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0"), f"{path} lacks the licence line"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno} prints; use headrace.logger or sys.stdout"
            assert node.func.id not in ("hasattr", "getattr"), f"{path}:{node.lineno} probes with {node.func.id}"
    assert sum(f"{name}.py" in text for name in ("common", "misc")) == 0
    assert path.name not in ("common.py", "misc.py", "utils.py")


def test_every_setting_has_a_docstring_and_a_default() -> None:
    for path in sorted((ROOT / "config").glob("*.py")):
        for cls in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)):
            if not any(ast.unparse(b).endswith("Config") or ast.unparse(b) == "LlmArgs" for b in cls.bases):
                continue
            for i, node in enumerate(cls.body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                    if "ClassVar" in ast.unparse(node.annotation):
                        continue
                    after = cls.body[i + 1] if i + 1 < len(cls.body) else None
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert documented, f"{path.name}: {cls.name}.{node.target.id} has no docstring"
                    has_default = node.value is not None or node.target.id in WITHOUT_DEFAULT
                    assert has_default, f"{path.name}: {cls.name}.{node.target.id} has no default"


def test_what_is_imported_is_what_the_package_asks_for() -> None:
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT.parent / "pyproject.toml").read_text(), re.M | re.S)
    assert listed
    asked = {name.lower().replace("-", "_") for name in re.findall(r'"([\w-]+)', listed[1])}
    names = importlib.metadata.packages_distributions()
    for path in FILES:
        for name in imports(ast.parse(path.read_text())):
            top = name.split(".")[0]
            if top == "headrace" or top in sys.stdlib_module_names or top in COME_WITH:
                continue
            homes = {home.lower().replace("-", "_") for home in names.get(top, [top])}
            assert homes & asked, f"{path.relative_to(ROOT)} imports {top}, which is no dependency in pyproject.toml"
