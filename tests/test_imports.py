"""The walls between the packages (design: layout and import rules), read from the source with `ast`."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvrelay"
PACKAGES = ("gateway", "prefill", "decode", "transfer", "kernels", "model", "planner", "bench", "deploy")

# What each package may import of the others, by prefix. kvrelay's own modules ("" here) are open to all.
ALLOWED: dict[str, tuple[str, ...]] = {
    "": (),
    "gateway": (),
    "transfer": ("kernels",),
    "kernels": (),
    "model": ("kernels",),
    "prefill": ("model", "transfer"),
    "decode": ("model", "transfer", "prefill.scheduler"),
    "planner": ("prefill.scheduler", "decode.scheduler", "transfer.protocol", "gateway.router", "gateway.admission"),
    "bench": (),
    "deploy": (),
}
# Measure the hand-over, the kernels and the compute loop themselves, which cannot be seen from outside through HTTP.
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "bench.transfer": ("transfer",),
    "bench.kernels": ("kernels",),
    "bench.attention": ("kernels",),
    "bench.gpu_kernels": ("kernels",),
    "bench.gpu_step": ("kernels",),
    "bench.gpu_engine": ("model",),
    "bench.gpu_serving": ("model",),
    "bench.overheads": ("decode.worker", "model", "transfer.ports"),
}
# The command line starts processes: it imports their entry points, inside the command that runs them.
ENTRY_POINTS = ("gateway.server", "prefill.worker", "decode.worker", "bench.verify")
TORCH_FREE = ("gateway", "planner", "bench", "transfer.protocol", "prefill.scheduler", "decode.scheduler")
# Measure what is torch's, or computes with it, or is compared with it.
NEED_TORCH = (
    "bench.kernels", "bench.attention", "bench.gpu_kernels", "bench.gpu_step", "bench.gpu_engine", "bench.gpu_model",
    "bench.gpu_serving", "bench.overheads", "bench.overheads_parts", "bench.overheads_steps",
    "bench.versus_transformers",
)  # fmt: skip
BANNED_NAMES = {"utils", "util", "common", "core", "base", "helper", "helpers", "manager", "managers"}


@dataclass(frozen=True)
class Import:
    """One imported name as an absolute module path, and whether the import stands inside a function."""

    module: str
    line: int
    in_function: bool


def modules() -> dict[str, ast.Module]:
    """Every module of KVRelay by its name below `kvrelay`, such as `gateway.router`, with its syntax tree."""
    files = {path.stem: path for path in SOURCE.glob("*.py")}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            files[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return {name.removesuffix(".__init__"): ast.parse(path.read_text(), str(path)) for name, path in files.items()}


MODULES = modules()


def imports(name: str) -> list[Import]:
    """Everything a module imports, wherever in it."""
    return list(_walk(MODULES[name], name, in_function=False))


def _walk(node: ast.AST, name: str, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = child.module or ""
            assert not child.level, f"{name}:{child.lineno} imports relatively; name the module in full"
            yield from (Import(f"{origin}.{alias.name}", child.lineno, inside) for alias in child.names)
        yield from _walk(child, name, inside)


def target(module: str) -> str | None:
    """The KVRelay module that an import reaches, None for others'. `from package import name` may name either."""
    parts = module.split(".")
    if parts[0] != "kvrelay":
        return None
    for end in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:end])) in MODULES:
            return name
    return "__init__"


def package_of(name: str) -> str:
    """The package a module belongs to; "" for kvrelay's own modules."""
    head = name.partition(".")[0]
    return head if head in PACKAGES else ""


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is one of the prefixes, below one, or spun off one (`scheduler_queue` of `scheduler`)."""
    return any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}_")) for prefix in prefixes)


def allowed_to(name: str) -> tuple[str, ...]:
    """What a module may import of other packages: what its package may, and its own exceptions."""
    extra = [prefixes for module, prefixes in EXCEPTIONS.items() if within(name, (module,))]
    return ALLOWED[package_of(name)] + tuple(prefix for prefixes in extra for prefix in prefixes)


def is_entry_point(name: str, each: Import) -> bool:
    """The command line's licence to reach into packages."""
    return name == "cli" and each.in_function and target(each.module) in ENTRY_POINTS


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_only_what_the_table_allows(name: str) -> None:
    """A package knows only the packages it is meant to know."""
    own = package_of(name)
    for each in imports(name):
        reached = target(each.module)
        if reached is None or is_entry_point(name, each):
            continue
        allowed = package_of(reached) in ("", own) or within(reached, allowed_to(name))
        assert allowed, f"{name}:{each.line} imports kvrelay.{reached}, which {own or 'kvrelay itself'} may not know"


def test_transfer_uses_kernels_in_its_transports_only() -> None:
    """The hand-over protocol is pure."""
    reached = [
        target(each.module) or "" for name in MODULES if within(name, ("transfer.protocol",)) for each in imports(name)
    ]
    assert not [name for name in reached if package_of(name) == "kernels"]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if within(name, TORCH_FREE) or not package_of(name)))
def test_the_pure_parts_load_without_torch(name: str) -> None:
    """The gateway, the planner, the schedulers and the protocol run, and are tested, where no torch is."""
    if name not in NEED_TORCH:
        path = path_to_torch(name, seen=set())
        assert not path, f"{' -> '.join(path)} -> torch"


def path_to_torch(name: str, seen: set[str]) -> list[str]:
    """The chain of imports by which a module loads torch; empty if there is none."""
    seen.add(name)
    for each in imports(name):
        if each.module.partition(".")[0] == "torch":
            return [name]
        reached = target(each.module)
        follow = reached in MODULES and reached not in seen and not is_entry_point(name, each)
        if reached and follow and (path := path_to_torch(reached, seen)):
            return [name, *path]
    return []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_packages_are_imported_by_their_full_name(name: str) -> None:
    """`import gateway` works in a checkout and takes another package, or none, once installed."""
    for each in imports(name):
        assert each.module.partition(".")[0] not in PACKAGES, f"{name}:{each.line}: write kvrelay.{each.module}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_hides_under_type_checking(name: str) -> None:
    """A type that cannot be imported at run time is a cycle in disguise."""
    names = {node.id for node in ast.walk(MODULES[name]) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(MODULES[name]) if isinstance(node, ast.Attribute)}
    assert "TYPE_CHECKING" not in names


def test_there_are_no_cycles() -> None:
    """Also none that an import inside a function would hide."""
    graph = {
        name: {reached for each in imports(name) if (reached := target(each.module)) in MODULES and reached != name}
        for name in MODULES
    }
    done: set[str] = set()
    for name in graph:
        assert_acyclic(graph, name, (), done)


def assert_acyclic(graph: dict[str, set[str]], name: str, path: tuple[str, ...], done: set[str]) -> None:
    """Depth first; fails with the cycle it found."""
    assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
    if name in done:
        return
    for reached in graph[name]:
        assert_acyclic(graph, reached, (*path, name), done)
    done.add(name)


def test_imports_inside_functions_are_the_command_lines_only() -> None:
    """Elsewhere they would hide what a module needs."""
    hidden = [
        f"{name}:{each.line} {each.module}"
        for name in MODULES
        if name != "cli"
        for each in imports(name)
        if each.in_function and target(each.module) is not None
    ]
    assert not hidden


def test_names_say_what_is_inside() -> None:
    """No drawer for odds and ends."""
    folders = [SOURCE, ROOT / "tests", *(ROOT / package for package in PACKAGES)]
    paths = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    assert not [path for path in paths if path.stem.removeprefix("test_") in BANNED_NAMES]


def test_every_package_has_its_link() -> None:
    """Relative, so that any checkout works, and one for each package there is."""
    links = {path.name: os.readlink(path) for path in SOURCE.iterdir() if path.is_symlink()}
    assert links == {name: os.path.join("..", "..", name) for name in links}
    assert {name for name in PACKAGES if any((ROOT / name).rglob("*.py"))} <= set(links)
    assert all((SOURCE / name).is_dir() for name in links)


def test_kernels_is_no_regular_package() -> None:
    """A real `kernels` package on the path must win over the folder in a checkout."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_walk_sees_what_it_should() -> None:
    """The rules above would hold emptily if nothing were found."""
    assert {"config", "cli", "gateway.cluster", "prefill.scheduler"} <= set(MODULES)
    assert target("kvrelay.types.Role") == "types"
    assert target("kvrelay.gateway.cluster.Cluster") == "gateway.cluster"
    assert target("os.path") is None
    assert within("decode.scheduler_grants", ("decode.scheduler",))
    assert not within("decode.schedulers", ("decode.scheduler",))
    lazy = [each for each in imports("cli") if is_entry_point("cli", each)]
    assert {target(each.module) for each in lazy} == {point for point in ENTRY_POINTS if point in MODULES}
