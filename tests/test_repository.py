"""The house rules: who may import whom, how large a file may be, what the docs must say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashskip
from flashskip import _env

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashskip"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

# ---- imports -----------------------------------------------------------------------------------

# Modules below flashskip that may import the JIT, besides itself. Everything else goes through
# _kernels; _maps describes tensors to the TMA unit, _plan names the type of the kernel it holds.
MAY_SEE_THE_JIT = {"_kernels", "_maps", "_plan", "_env", "errors", "cli", "_doctor"}

# Where -> what it must not import, directly or through others.
MUST_NOT_REACH = {
    "reference": {"_kernels", "_jit", "_tiles", "variant", "_wrapper", "prefill", "decode"},
    "geometry": {"_kernels", "_jit", "_tiles", "variant", "_wrapper", "reference"},
    "variant": {"_kernels", "_jit", "_tiles", "_wrapper", "reference", "_env"},
    "_tiles": {"_kernels", "_jit", "_wrapper", "reference", "_env"},
    "_checks": {"_kernels", "_jit", "_tiles", "_wrapper", "reference"},
    "_kernels": {"_wrapper", "prefill", "decode", "reference", "_checks", "integrations"},
    "state": {"_wrapper", "prefill", "decode", "integrations"},
    "prefill": {"decode", "integrations", "cli"},
    "decode": {"prefill", "integrations", "cli"},
}

FRAMEWORKS = {"transformers", "diffusers", "gguf", "vllm"}
MAY_USE_FRAMEWORKS = ("integrations", "calibration")  # calibration measures a model


def imports_of(name: str, tree: ast.AST) -> Iterator[str]:
    """Names of modules that the nodes of `tree` import, in full."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*base, node.module or ""]) if node.level else node.module or ""
            yield from (f"{module.strip('.')}.{alias.name}" for alias in node.names)


def top_level(tree: ast.Module) -> ast.Module:
    """The statements that run at import, without those for type checkers."""
    body = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.Module(body=body, type_ignores=[])


def our_modules(names: Iterator[str]) -> set[str]:
    """The modules of this package among imported names, which may be names inside modules."""
    found = set()
    for name in names:
        while name.startswith("flashskip.") and name not in MODULES:
            name = name.rpartition(".")[0]
        if name.startswith("flashskip."):
            found.add(name)
    return found


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
GRAPH = {name: our_modules(imports_of(name, top_level(tree))) for name, tree in TREES.items()}


def reachable(start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for name in GRAPH[todo.pop()] - found:
            found.add(name)
            todo.append(name)
    return found


def inside(module: str, part: str) -> bool:
    return module == f"flashskip.{part}" or module.startswith(f"flashskip.{part}.")


def test_imports_have_no_circle():
    """A module that reaches itself only through its own package's __init__ is no circle."""
    for module in MODULES:
        through = {m for m in GRAPH[module] if module in {m} | reachable(m)}
        assert not through, f"{module} and {through} import each other"


def test_the_jit_never_imports_its_parent():
    for name, tree in TREES.items():
        if inside(name, "_jit"):
            outside = {m for m in our_modules(imports_of(name, tree)) if not inside(m, "_jit")}
            assert not outside, f"{name} imports {outside}"


def test_only_few_modules_see_the_jit():
    for name, tree in TREES.items():
        part = name.removeprefix("flashskip.").split(".")[0]
        if part == "_jit" or part in MAY_SEE_THE_JIT:
            continue
        seen = {m for m in our_modules(imports_of(name, tree)) if inside(m, "_jit")}
        assert not seen, f"{name} imports {seen}; go through flashskip._kernels"


@pytest.mark.parametrize("where", MUST_NOT_REACH)
def test_imports_go_one_way(where):
    reached = {m for name in MODULES if inside(name, where) for m in reachable(name)}
    wrong = {m for m in reached for part in MUST_NOT_REACH[where] if inside(m, part)}
    assert not wrong, f"flashskip.{where} reaches {wrong}"


def test_frameworks_are_imported_in_few_places_and_when_used():
    for name, tree in TREES.items():
        used = {m.split(".")[0] for m in imports_of(name, tree)} & FRAMEWORKS
        allowed = any(inside(name, part) for part in MAY_USE_FRAMEWORKS)
        assert not used or allowed, f"{name} imports {used}"
        at_import = {m.split(".")[0] for m in imports_of(name, top_level(tree))} & FRAMEWORKS
        assert not at_import, f"{name} imports {at_import} at its top"


BLOCKED = {
    "flashskip": ("torch", "cuda", "jinja2", "numpy"),
    "flashskip.variant": ("torch", "cuda", "jinja2", "numpy"),
    "flashskip._tiles": ("torch", "cuda", "jinja2"),
    "flashskip._kernels": ("torch",),
    "flashskip._jit.worker": ("torch", "flashskip.variant", "flashskip._kernels"),
    "flashskip.cli": ("torch", "transformers"),
    "flashskip.reference": ("cuda", "jinja2", "flashskip.variant", "flashskip._jit"),
    "flashskip.prefill, flashskip.decode": ("transformers",),
}


@pytest.mark.parametrize("module", BLOCKED)
def test_module_imports_without(module):
    block = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED[module]!r}))"
    run_python(f"{block}; import {module}")


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that finds the package in the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what an import does -----------------------------------------------------------------------

WATCH = """
import sys, time, torch, numpy
written = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        written.append(args[0])
    elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        written.append((event, args))
sys.dont_write_bytecode = True
sys.addaudithook(watch)
start = time.process_time()
import flashskip
print(time.process_time() - start)
from flashskip import BatchDecodeWrapper, BatchPrefillWrapper
assert not torch.cuda.is_initialized()
assert not written, written
"""


def test_import_is_quick_and_touches_neither_cuda_nor_the_disk():
    seconds = float(run_python(WATCH))
    assert seconds < 0.1


def test_public_names_are_found_where_they_live():
    assert sorted(flashskip.__all__) == flashskip.__all__
    assert set(flashskip.__all__) == {*flashskip._HOME, "reference"}
    for name in flashskip.__all__:
        assert getattr(flashskip, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashskip.nothing


# ---- sizes -------------------------------------------------------------------------------------

BUDGETS = {"flashskip": 350, "benchmarks": 350, "tests": 600, "templates": 400, "csrc": 150}
FUNCTION_BUDGET = 60

# Files above the budget, each with its own and the reason.
LARGER = {
    "flashskip/_wrapper.py": (355, "what both wrappers share, from plan to launch"),
    "flashskip/prefill.py": (400, "two plans and a run, each with the docstring of its arguments"),
    "flashskip/policy/config.py": (450, "every spelling of the options of one dataclass"),
    "templates/decode_sm90.cu.jinja": (820, "three warpgroups with programs of their own; FP8"),
    "templates/prefill_sm90.cu.jinja": (560, "score, vote and output of one pipeline"),
    "csrc/prefill_schedule.cuh": (
        300,
        "one order of all items, its pieces, its pairs, and their description",
    ),
    "csrc/decode_schedule.cuh": (230, "stream-K: segments, their neighbours, and who merges"),
    "tests/test_policy_spellings.py": (610, "one case for each spelling of three engines"),
    "tests/test_cache.py": (680, "one case for each way a cache directory can be damaged"),
}


def sized_files() -> list[Path]:
    return [
        path
        for folder in BUDGETS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".jinja", ".cuh")
    ]


@pytest.mark.parametrize("path", sized_files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_file_is_within_its_budget(path):
    name = path.relative_to(ROOT).as_posix()
    budget, _ = LARGER.get(name, (BUDGETS[name.split("/")[0]], ""))
    lines = len(path.read_text().splitlines())
    assert lines <= budget, f"{name} has {lines} lines; split it, or raise the budget and say why"


def test_larger_files_exist():
    assert not [name for name in LARGER if not (ROOT / name).exists()]


def test_functions_are_short():
    """Code lines; a docstring is not held against a function."""
    long = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                first = node.body[1] if documented and len(node.body) > 1 else node.body[0]
                lines = node.end_lineno - first.lineno + 1
                if lines > FUNCTION_BUDGET:
                    long.append(f"{name}.{node.name}: {lines}")
    assert not long


# ---- docs --------------------------------------------------------------------------------------


def test_environment_variables_are_documented():
    table = (ROOT / "docs" / "environment.md").read_text()
    documented = re.findall(r"^\| `(FLASHSKIP_\w+)`", table, flags=re.MULTILINE)
    assert sorted(documented) == sorted(_env.VARIABLES)
    used = {
        name
        for path in MODULES.values()
        for name in re.findall(r"FLASHSKIP_[A-Z_]+", path.read_text())
    }
    assert used <= set(_env.VARIABLES)


def test_only_env_reads_the_environment():
    readers = {
        n for n, path in MODULES.items() if re.search(r"os\.(environ|getenv)", path.read_text())
    }
    # The build passes its own environment on to ninja.
    assert readers == {"flashskip._env", "flashskip._jit.build"}


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_paths_in_docs_exist(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    relative = [link for link in links if link and "://" not in link]
    missing = [link for link in relative if not (path.parent / link).exists()]
    folders = "|".join((*BUDGETS, "docs", r"\.ci"))
    named = re.findall(rf"`((?:{folders})/[\w./*-]+)`", text)
    missing += [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("text", ["LICENSE", "pyproject.toml", "Makefile", ".ci/run", "README.md"])
def test_file_is_there(text):
    assert (ROOT / text).read_text().strip()
