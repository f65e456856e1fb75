"""Who may import whom, read from the sources: one way only, and no JAX on the host's line.

A room may import itself, the rooms it names as below it, and whatever those may import. Every import counts, at
module level, in a function or for type checkers only; the package's own `__init__`, at the top, looks LLM up late
so that `import jaxpaged.scheduler` brings no JAX along.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxpaged", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Room:
    """Modules (packages with all they hold) that may import each other and what lies `above`."""

    members: tuple[str, ...]
    above: tuple[str, ...] = ()  # a member of each room directly below
    host: bool = False  # never imports JAX


ROOMS = (
    Room(
        ("config", "reservation", "sampling_params", "outputs", "startup", "models.config", "models.shapes"), host=True
    ),
    Room(("request",), above=("config",), host=True),
    Room(("block_pool",), above=("request",), host=True),
    Room(("block_manager",), above=("block_pool",), host=True),
    Room(("beam_group",), above=("block_manager",), host=True),
    Room(("scheduler",), above=("beam_group",), host=True),
    Room(("batch",), above=("scheduler",)),
    Room(("checkpoints",), above=("config",), host=True),
    Room(("tokenizer", "detokenizer"), above=("checkpoints",), host=True),
    Room(("completion",), above=("request", "tokenizer"), host=True),
    Room(("beams",), above=("config",), host=True),
    Room(("beam_completion",), above=("beam_group", "beams", "completion"), host=True),
    Room(("logit_edits",), above=("config",), host=True),
    Room(("pallas_kernels",)),
    Room(("device_memory",)),
    Room(("kv_cache", "models"), above=("config", "pallas_kernels", "device_memory")),
    Room(("beam_candidates",), above=("beams",)),
    Room(("compilation_cache",), above=("checkpoints",)),
    Room(("compiling",), above=("config", "pallas_kernels")),
    Room(("logit_passes",), above=("logit_edits", "compiling")),
    Room(("sampler",), above=("kv_cache",)),
    Room(("step_buffers",), above=("batch", "models")),
    Room(("executables",), above=("batch", "sampler", "logit_passes")),
    Room(("pool_size",), above=("executables",)),
    Room(("runner",), above=("executables", "step_buffers", "beam_candidates")),
    Room(("engine",), above=("runner", "scheduler", "batch", "beam_completion")),
    Room(("model_source",), above=("models", "tokenizer")),
    Room(("build",), above=("engine", "model_source", "compilation_cache", "pool_size")),
    Room(("llm", "async_engine"), above=("build",)),
    Room(("server",), above=("llm",)),
    Room(("cli_options",), above=("llm",)),
    Room(("bench.workload", "bench.report", "bench.memory"), above=("batch",), host=True),
    Room(("bench",), above=("cli_options", "bench.memory")),
    Room(("cli", "__main__"), above=("server", "bench")),
    Room(("jaxpaged",), above=("llm",)),  # the package's __init__
)

# What brings JAX along by being imported.
JAX = ("jax", "jaxlib", "flax", "optax", "orbax", "jax_triton", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Import:
    target: str  # a module of ours by its full name, else what was written
    line: int
    at_module_level: bool
    for_typing: bool


# --- reading


def find_modules(root: Path) -> dict[str, Path]:
    """Full name -> file, of all modules of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(body: list[ast.stmt], module_level: bool, typing: bool) -> Iterator[tuple[ast.stmt, bool, bool]]:
    """All import statements, each with whether it is at module level and whether only type checkers see it."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, module_level, typing
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from walk(node.body, module_level, True)
            yield from walk(node.orelse, module_level, typing)
        else:
            inside = module_level and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                statements = [child] if isinstance(child, ast.stmt) else getattr(child, "body", [])
                if isinstance(statements, list):
                    yield from walk(statements, inside, typing)


def read_imports(name: str, path: Path, modules: dict[str, Path]) -> list[Import]:
    found = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, module_level, typing in walk(ast.parse(path.read_text(encoding="utf-8")).body, True, False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from package import name`: the module of that name where there is one
            named = [f"{base}.{alias.name}" for alias in node.names]
            targets = list(dict.fromkeys(target if target in modules else base for target in named))
        found += [Import(target, node.lineno, module_level, typing) for target in targets]
    return found


def read_tree(root: Path) -> dict[str, list[Import]]:
    modules = find_modules(root)
    return {name: read_imports(name, path, modules) for name, path in modules.items()}


# --- judging


def is_ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def room_of(name: str) -> Room | None:
    """The room whose member names this module most closely; the bare `jaxpaged` is its own."""
    parts = (name if name in ("jaxpaged",) else name.removeprefix("jaxpaged.")).split(".")
    for length in range(len(parts), 0, -1):
        for room in ROOMS:
            if ".".join(parts[:length]) in room.members:
                return room
    return None


def rooms_below(room: Room) -> set[Room]:
    below = {room}
    for name in room.above:
        lower = room_of(name)
        assert lower is not None, f"ROOMS names {name}, which is in no room"
        below |= rooms_below(lower)
    return below


def find_misplaced(tree: dict[str, list[Import]]) -> list[str]:
    return [
        f"{name} is in no room: place it in ROOMS of tests/test_import_order.py, with what it may import"
        for name in tree
        if room_of(name) is None
    ]


def find_upward(tree: dict[str, list[Import]]) -> list[str]:
    """Imports of a room that does not lie below."""
    wrong = []
    for name, imports in tree.items():
        room = room_of(name)
        if room is None:
            continue
        for found in imports:
            target = room_of(found.target) if is_ours(found.target) else None
            if target is not None and target not in rooms_below(room):
                wrong.append(f"{name}:{found.line} imports {found.target}, which is not below it")
    return wrong


def loaded_with(name: str, tree: dict[str, list[Import]]) -> list[str]:
    """What importing this module of ours imports in turn: its module level, and its parent packages."""
    parts = name.split(".")
    parents = [".".join(parts[:length]) for length in range(1, len(parts))]
    return parents + [i.target for i in tree.get(name, []) if i.at_module_level and not i.for_typing]


def way_to_jax(name: str, tree: dict[str, list[Import]]) -> list[str] | None:
    """The chain of imports that loads JAX when the module is imported or used, or None."""
    direct = [i.target for i in tree[name] if not i.for_typing]  # its own late imports count too
    ways = [[name, target] for target in direct + loaded_with(name, tree)]
    seen = {name}
    while ways:
        way = ways.pop(0)
        last = way[-1]
        if last.split(".")[0] in JAX:
            return way
        if last not in seen and is_ours(last):
            seen.add(last)
            ways += [[*way, target] for target in loaded_with(last, tree)]
    return None


def host_modules(tree: dict[str, list[Import]]) -> list[str]:
    return [name for name in tree if (room := room_of(name)) is not None and room.host]


def find_jax_on_host(tree: dict[str, list[Import]]) -> list[str]:
    ways = [way_to_jax(name, tree) for name in host_modules(tree)]
    return ["a host module reaches JAX: " + " -> ".join(way) for way in ways if way is not None]


# --- the tree as it is


@pytest.fixture(scope="module")
def tree() -> dict[str, list[Import]]:
    return read_tree(ROOT)


def test_every_module_has_a_room(tree: dict[str, list[Import]]) -> None:
    assert find_misplaced(tree) == []


def test_imports_go_one_way(tree: dict[str, list[Import]]) -> None:
    assert find_upward(tree) == []


def test_the_host_line_does_not_import_jax(tree: dict[str, list[Import]]) -> None:
    assert find_jax_on_host(tree) == []


def test_the_host_line_runs_without_jax(tree: dict[str, list[Import]]) -> None:
    """In a fresh interpreter, third-party packages included."""
    modules = host_modules(tree)
    assert modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'jax' in sys.modules: sys.exit(f'importing {name} loads jax')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# --- the checker itself, on small trees


def make_tree(root: Path, files: dict[str, str]) -> dict[str, list[Import]]:
    """A tree of these files, written as module names with their sources."""
    for name, source in {"jaxpaged.__init__": "", "jaxpaged.models.__init__": "", **files}.items():
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return read_tree(root)


def test_rooms_are_placed_once_and_form_no_circle() -> None:
    members = [member for room in ROOMS for member in room.members]
    assert len(members) == len(set(members))
    for room in ROOMS:
        rooms_below(room)  # recursion without end in a circle


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("jaxpaged.request", "from jaxpaged.scheduler import Scheduler"),
        ("jaxpaged.request", "from jaxpaged import scheduler"),
        ("jaxpaged.request", "from . import scheduler"),
        ("jaxpaged.request", "from .scheduler import Scheduler"),
        ("jaxpaged.request", "import jaxpaged.scheduler as s"),
        ("jaxpaged.request", "def late():\n    import jaxpaged.scheduler"),
        ("jaxpaged.request", "class C:\n    def late(self):\n        from jaxpaged import scheduler"),
        ("jaxpaged.request", "try:\n    pass\nexcept OSError:\n    import jaxpaged.scheduler"),
        ("jaxpaged.request", "match 1:\n    case 1:\n        import jaxpaged.scheduler"),
        ("jaxpaged.request", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxpaged import scheduler"),
        ("jaxpaged.models.llama", "from ..scheduler import Scheduler"),
        ("jaxpaged.models.llama", "from jaxpaged.batch import StepInputs"),
        ("jaxpaged.models.config", "from jaxpaged.models.llama import Llama"),
        ("jaxpaged.block_pool", "import jaxpaged.block_manager"),
        ("jaxpaged.scheduler", "from jaxpaged import LLM"),
        ("jaxpaged.sampler", "import jaxpaged.runner"),
        ("jaxpaged.engine", "from jaxpaged.llm import LLM"),
        ("jaxpaged.llm", "from jaxpaged.cli import main"),
        ("pallas_kernels.paged_attention.api", "from jaxpaged.config import EngineConfig"),
        ("pallas_kernels.dispatch", "def late():\n    import jaxpaged"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, name: str, source: str) -> None:
    files = {f"jaxpaged.{module}": "" for module in ("scheduler", "block_manager", "batch", "runner", "llm", "cli")}
    wrong = find_upward(make_tree(tmp_path, {"jaxpaged.models.llama": "", **files, name: source}))
    assert len(wrong) == 1, wrong
    assert wrong[0].startswith(f"{name}:")


def test_downward_imports_pass(tmp_path: Path) -> None:
    files = {
        "jaxpaged.config": "",
        "jaxpaged.request": "from jaxpaged.config import EngineConfig\nfrom . import sampling_params\nimport numpy",
        "jaxpaged.sampling_params": "import jaxpaged.config",
        "jaxpaged.models.config": "",
        "jaxpaged.models.llama": "from .config import A\nfrom jaxpaged.kv_cache import B\nimport pallas_kernels.x",
        "jaxpaged.kv_cache": "import jax\nfrom pallas_kernels import x",
        "jaxpaged.llm": "import jaxpaged.engine, jaxpaged.request",
        "jaxpaged.engine": "def late():\n    from jaxpaged import request",
        "jaxpaged.__init__": "def __getattr__(name):\n    from jaxpaged.llm import LLM\n    return LLM",
        "pallas_kernels.x": "import jax",
    }
    tree = make_tree(tmp_path, files)
    assert find_upward(tree) + find_misplaced(tree) + find_jax_on_host(tree) == []


def test_a_module_without_a_room_is_named(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"jaxpaged.utils": "", "jaxpaged.drawer.things": "", "jaxpaged.models.new": ""})
    assert [line.split(" ")[0] for line in find_misplaced(tree)] == ["jaxpaged.drawer.things", "jaxpaged.utils"]


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ({"jaxpaged.scheduler": "import jax.numpy as jnp"}, "jaxpaged.scheduler -> jax.numpy"),
        ({"jaxpaged.scheduler": "from jax import lax"}, "jaxpaged.scheduler -> jax"),
        ({"jaxpaged.tokenizer": "def late():\n    import jax"}, "jaxpaged.tokenizer -> jax"),
        ({"jaxpaged.checkpoints.orbax": "import orbax.checkpoint"}, "jaxpaged.checkpoints.orbax -> orbax.checkpoint"),
        ({"jaxpaged.request": "import pallas_kernels"}, "jaxpaged.request -> pallas_kernels"),
        (
            {"jaxpaged.request": "import jaxpaged.stuff", "jaxpaged.stuff": "if True:\n    import flax"},
            "jaxpaged.request -> jaxpaged.stuff -> flax",
        ),
        (
            {
                "jaxpaged.models.config": "",
                "jaxpaged.models.__init__": "from . import llama",
                "jaxpaged.models.llama": "import flax",
            },
            "jaxpaged.models.config -> jaxpaged.models -> jaxpaged.models.llama -> flax",
        ),
        (
            {"jaxpaged.config": "", "jaxpaged.__init__": "from .llm import LLM", "jaxpaged.llm": "import jax"},
            "jaxpaged.config -> jaxpaged -> jaxpaged.llm -> jax",
        ),
    ],
)
def test_jax_on_the_host_line_is_found(tmp_path: Path, files: dict[str, str], way: str) -> None:
    assert find_jax_on_host(make_tree(tmp_path, files)) == [f"a host module reaches JAX: {way}"]


@pytest.mark.parametrize(
    "files",
    [
        {"jaxpaged.config": "", "jaxpaged.__init__": "def __getattr__(name):\n    import jax"},
        {"jaxpaged.config": "", "jaxpaged.__init__": "import typing\nif typing.TYPE_CHECKING:\n    import jax"},
        {"jaxpaged.config": "import jaxtyping", "jaxpaged.kv_cache": "import jax"},
    ],
)
def test_late_and_typing_imports_load_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    assert find_jax_on_host(make_tree(tmp_path, files)) == []
