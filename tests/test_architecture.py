"""The shape of the code: who imports whom, what an import does, what is public, how long it is."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tileattn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tileattn"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("tileattn", "tests", "benchmarks", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
)

# Libraries that may be absent, or that are too heavy to load before a caller asks for them.
LAZY = {
    "cuda",
    "cupy",
    "cupyx",
    "hypothesis",
    "jax",
    "matplotlib",
    "mpi4py",
    "scipy",
    "torch",
    "transformers",
}
# Those that are for users of one library, who have it.
BRIDGES = ("jax", "torch")

PUBLIC = {
    "Attention",
    "BackendUnavailableError",
    "BlockMask",
    "Gradients",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "available_backends",
    "backward",
    "cascade",
    "dropout_mask",
    "explain",
    "forward",
    "merge",
    "reference",
    "register_backend",
    "rope",
    "testing",
    "vjp",
}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70  # without the docstring


def name_of(path: Path) -> str:
    """Relative path with forward slashes: what a message prints."""
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def only_faults(found: dict[str, Any]) -> dict[str, Any]:
    """Keep the files where something was found."""
    return {name: faults for name, faults in found.items() if faults}


# --- the direction of the imports ---------------------------------------------------------------


def module_of(path: Path) -> str:
    """Name of a module below ``tileattn``: ``blocks``, ``backends.protocol``, ``backends``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {module_of(path) for path in MODULES}


def targets(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    """Full dotted names that an import statement binds."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    package = ["tileattn", *path.relative_to(PACKAGE).parts[:-1]]
    above = package[: len(package) + 1 - node.level] if node.level else []
    base = [*above, *filter(None, [node.module])]
    yield from (".".join([*base, alias.name]) for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a module imports, wherever in the module it does so."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node, path):
                head, *parts = target.split(".")
                if head == "tileattn":
                    while ".".join(parts) not in NAMES:
                        parts.pop()
                    found.add(".".join(parts))
    return found


# What each module may import. A package stands for its modules that have no row of their own; they
# may import one another.
LEAVES = {"array_functions", "dtypes", "errors", "lru", "messages", "results", "validation"}
FACTS = LEAVES | {"call", "expressions"}
CUDA = {f"kernels.cuda.{name}" for name in ("families", "jit", "plan", "tile_sizes", "tuning")}
LLVM_FACTS = {f"kernels.llvm.{x}" for x in ("params", "sizes", "target", "user_functions")}
KERNELS = CUDA | LLVM_FACTS | {"kernels.disk_cache", "kernels.llvm"}
PARTS = {f"distributed.{x}" for x in ("arrays", "layout", "rank_blocks", "visibility")}
DISTRIBUTED = {f"distributed.{x}" for x in ("call", "comm", "layout", "model", "schedules")}
MAY_IMPORT: dict[str, set[str]] = {
    "dtypes": set(),
    "errors": set(),
    "array_functions": set(),
    "lru": set(),
    "messages": set(),
    "validation": {"dtypes", "messages"},
    "results": set(),
    "expressions": LEAVES,
    "call": LEAVES | {"expressions"},
    # The oracle's arithmetic shares no code with what it judges; its entry validates the call as
    # the library does, and does nothing else with it.
    "oracle": {"array_functions", "results"},
    "reference": FACTS | {"oracle"},
    "traffic.record": set(),
    "algorithm": FACTS | {"traffic.record"},
    "traffic": FACTS | {"algorithm", "traffic.record"},
    "kernels": set(),
    "kernels.disk_cache": set(),
    "kernels.cuda": set(),
    "kernels.cuda.tile_sizes": set(),
    "kernels.cuda.tuning": set(),
    "kernels.cuda.families": FACTS | {"kernels.cuda.tile_sizes", "kernels.cuda.tuning"},
    "kernels.cuda.jit": LEAVES | {"kernels.cuda.families", "kernels.disk_cache"},
    "kernels.cuda.plan": FACTS | {"algorithm", "kernels.cuda.families", "kernels.cuda.tuning"},
    "kernels.llvm.params": {"call"},
    "kernels.llvm.target": set(),
    "kernels.llvm.sizes": {"kernels.llvm.target"},
    "kernels.llvm.user_functions": {"expressions"},
    "kernels.llvm.instructions": LLVM_FACTS - {"kernels.llvm.sizes"},
    "kernels.llvm.tiles": LLVM_FACTS | {"kernels.llvm.instructions"},
    "kernels.llvm.attention": LLVM_FACTS
    | {"expressions", "kernels.llvm.instructions", "kernels.llvm.tiles"},
    "kernels.llvm": LLVM_FACTS
    | {"call", "expressions", "kernels.disk_cache", "kernels.llvm.attention", "lru"}
    | {"kernels.llvm.instructions", "kernels.llvm.tiles"},
    "backends.threads": set(),
    "backends": FACTS | KERNELS | {"algorithm", "backends.threads", "traffic", "traffic.record"},
    "api": FACTS | {"algorithm", "backends"},
    "cascading": FACTS | {"api", "backends", "merging"},
    "differentiation": FACTS | {"api"},
    "merging": FACTS | {"algorithm", "backends"},
    "kv_cache": FACTS | {"backends", "quantise", "rotary"},
    "quantise": {"dtypes"},
    "rotary": FACTS | {"backends"},
    "testing": FACTS | {"oracle", "reference"},
    "testing.template": FACTS | {"backends"},
    "testing.test_contract": FACTS | {"", "backends", "reference", "testing", "testing.selfcheck"},
    "testing.selfcheck": FACTS | KERNELS | {"backends", "reference", "testing"},
    "": FACTS
    | {"algorithm", "api", "backends", "cascading", "differentiation", "kv_cache", "merging"}
    | {"reference", "rotary", "testing"},
    "jax": FACTS | {"", "backends", "cascading", "distributed", "distributed.layout"},
    # What a rank has of a call, the messages, and the schedules: none of them knows the model.
    "distributed.arrays": {"backends"},
    "distributed.comm": LEAVES | {"distributed.arrays"},
    "distributed.layout": LEAVES | {"distributed.arrays"},
    "distributed.visibility": FACTS | {"algorithm", "distributed.layout"},
    "distributed.rank_blocks": PARTS - {"distributed.rank_blocks"} | {"algorithm"},
    "distributed.call": FACTS | PARTS | {"distributed.comm"},
    "distributed.schedules": FACTS
    | PARTS
    | {"", "algorithm", "backends", "distributed.call", "distributed.comm"},
    "distributed.model": FACTS | PARTS | {"distributed.call", "distributed.schedules"},
    "distributed": FACTS | PARTS | {"backends"} | DISTRIBUTED,
    "torch": FACTS | {"", "backends", "distributed", "merging"} | DISTRIBUTED,
    "cli": FACTS | KERNELS | {"", "backends", "backends.threads", "testing.selfcheck"},
    "__main__": {"cli"},
}


def row_of(name: str) -> str | None:
    """Row of a module: its own, or that of the nearest package around it."""
    while name not in MAY_IMPORT and name:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def test_every_module_has_a_row() -> None:
    assert [name for name in NAMES if row_of(name) is None] == []


def test_imports_run_one_way() -> None:
    wrong = {}
    for path in MODULES:
        row = row_of(module_of(path)) or ""
        used = {row_of(other) for other in own_imports(path)} - {row}
        wrong[name_of(path)] = used - MAY_IMPORT[row]
    assert only_faults(wrong) == {}


def test_bridges_know_no_backend_by_name() -> None:
    shared = {name for name in NAMES if name.count(".") == 1}
    used = {
        name_of(path): {x for x in own_imports(path) if x.startswith("backends.")} - shared
        for path in MODULES
        if module_of(path).split(".")[0] in BRIDGES
    }
    assert only_faults(used) == {}


def test_the_import_table_has_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(MAY_IMPORT)
    while waiting:
        ready = {name for name, others in waiting.items() if others - {name} <= done}
        assert ready, f"these modules import one another: {sorted(waiting)}"
        done |= ready
        for name in ready:
            del waiting[name]


def loaded_at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when the module is imported: all but those in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from loaded_at_import(child)


def test_heavy_libraries_are_imported_only_inside_functions() -> None:
    heavy = {
        name_of(path): {
            target
            for node in loaded_at_import(tree_of(path))
            for target in targets(node, path)
            if target.split(".")[0] in LAZY
        }
        for path in MODULES
        if module_of(path).split(".")[0] not in BRIDGES
    }
    assert only_faults(heavy) == {}


def test_only_what_runs_or_loads_kernels_imports_a_library_of_the_gpu() -> None:
    """Planning is pure: elsewhere none is imported, not even in a function."""
    others = {"testing.selfcheck", "torch.cuda", "distributed.comm.nccl"}
    found = set()
    for path in MODULES:
        nodes = (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Import | ast.ImportFrom))
        heads = {target.split(".")[0] for node in nodes for target in targets(node, path)}
        if heads & {"cuda", "cupy", "cupy_backends", "cupyx"}:
            found.add(module_of(path))
    runs_or_loads = ("backends.cupy", "kernels.cuda.jit")
    assert {name for name in found - others if not name.startswith(runs_or_loads)} == set()


# --- what is public -----------------------------------------------------------------------------


def test_public_names_are_those_of_the_contract() -> None:
    assert sorted(tileattn.__all__) == sorted(PUBLIC)
    assert all(hasattr(tileattn, name) for name in PUBLIC)


def test_nothing_public_is_left_out_of_all() -> None:
    named = {
        name
        for name, value in vars(tileattn).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert named <= set(tileattn.__all__)


# --- habits -------------------------------------------------------------------------------------


def test_the_package_validates_with_exceptions() -> None:
    """``python -O`` removes assert statements, so only the comparisons for tests may use them."""
    lines = {
        name_of(path): [x.lineno for x in ast.walk(tree_of(path)) if isinstance(x, ast.Assert)]
        for path in MODULES
        if module_of(path).split(".")[0] != "testing"
    }
    assert only_faults(lines) == {}


SILENCED = re.compile(r"#\s*(noqa|type:\s*ignore)")
EXPLAINED = re.compile(
    r"#\s*(noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)*|type: ignore\[[a-z-]+(, ?[a-z-]+)*\])\s+(#|-)\s+\w+"
)


def test_silenced_checks_name_their_rule_and_their_reason() -> None:
    bare = {name_of(path): unexplained(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert only_faults(bare) == {}


def unexplained(text: str) -> list[str]:
    """List the comments that silence a check and do not say why."""
    if not SILENCED.search(text):
        return []  # at a hundredth of the time
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        f"line {x.start[0]}: {x.string}"
        for x in tokens
        if x.type == tokenize.COMMENT
        and SILENCED.search(x.string)
        and not EXPLAINED.search(x.string)
    ]


def test_files_are_short() -> None:
    paths = (*SOURCES, *PACKAGE.rglob("*.cu*"))
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in paths}
    long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert long == {}, "divide them along an idea"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from ``def`` to its end, without its docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return total
    return total - ((first.end_lineno or first.lineno) - first.lineno + 1)


def test_functions_are_short() -> None:
    long = [
        f"{name_of(path)}: {node.name}: {body_lines(node)} lines"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize(
    ("comment", "fine"),
    [
        ("# noqa: E501  # the table is read by its columns", True),
        ("# type: ignore[no-any-return]  # cupy has no types", True),
        ("# noqa: E741 - the letter of the papers", True),
        ("# noqa", False),
        ("# noqa: E501", False),
        ("# type: ignore", False),
        ("# type: ignore[arg-type]", False),
    ],
)
def test_the_pattern_for_silenced_checks(comment: str, fine: bool) -> None:
    assert SILENCED.search(comment)
    assert bool(EXPLAINED.search(comment)) is fine


BESIDE = {"benchmarks", "contract", "docs", "gpu", "probes", "tools"}


def test_the_tests_mirror_the_package() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py")}
    missing = [f for f in folders if str(f) not in BESIDE and not (ROOT / "tileattn" / f).is_dir()]
    assert missing == []
