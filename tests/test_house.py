"""The rules of the house, held by tests: imports run one way, files stay short, twins stay twins, no switches."""

import ast
import inspect
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("workload", "jax_impl", "torch_impl", "parity", "bench")
MAY_IMPORT = {
    "workload": {"workload"},
    "jax_impl": {"workload", "jax_impl"},
    "torch_impl": {"workload", "torch_impl"},
    "parity": {"workload", "jax_impl", "torch_impl", "parity"},
    "bench": set(PACKAGES),
}
FOREIGN = {"workload": {"jax", "torch"}, "jax_impl": {"torch"}, "torch_impl": {"jax"}}
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
OTHERS = (  # variables of jobs' launchers and of the libraries below
    r"(XLA|JAX|OMPI|NCCL|CUDA|TORCH|TORCHELASTIC|PYTORCH|GLOO|TRITON|OMP|SLURM|MASTER|LOCAL|TF|LIBTPU|PYTHON)_|PYTHONPATH|"
    r"(RANK|WORLD_SIZE|PATH|HOME|COLUMNS)$"
)
LONGEST_FILE, LONGEST_FUNCTION = 500, 130


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno}: relative import"
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=label)
def test_imports_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    names = imported(path)
    assert names & set(PACKAGES) <= MAY_IMPORT[package]
    assert not names & FOREIGN.get(package, set())


@pytest.mark.parametrize("path", FILES, ids=label)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, node.name


@pytest.mark.parametrize("path", [p for p in FILES if p.read_text()], ids=label)
def test_public_things_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_switch_hides_in_the_environment(path):
    """Options are arguments and flags; the variables that are touched are other software's."""
    text = path.read_text()
    touched = re.findall(r"""(?:getenv\(|environ\.\w+\(|environ\[|env\[|env\.get\()\s*["'](\w+)["']""", text)
    assert [name for name in touched if not re.match(OTHERS, name)] == []
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


def loaded_at_import(module: str) -> set[str]:
    """Modules that importing `module` imports in turn: the statements outside functions, followed through our files."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        file = ROOT / Path(*name.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if name.split(".")[0] not in PACKAGES or not file.exists():
            continue
        todo += [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)]
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {name.split(".")[0] for name in seen}


ENTRIES = [p for p in FILES if label(p).startswith(("bench", "parity")) and "program.run(" in p.read_text()]


@pytest.mark.parametrize("path", [p for p in ENTRIES if "worker" not in p.name], ids=label)
def test_a_binary_loads_neither_stack(path):
    """bench and parity import a stack only where a worker needs it."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert not loaded_at_import(module) & {"jax", "torch"}
    assert "workload" in loaded_at_import("jax_impl.attention") and "torch" in loaded_at_import("torch_impl.attention")


def test_no_file_names_a_machine_or_a_registry():
    """Tracked text holds no absolute home or work path and no package index address."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a git checkout")
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in (".py", ".toml", ".txt", ".md", ".cfg", ".json", ".jsonl", ".html", "") and path.is_file():
            if re.search(r"/work/|/home/\w|index-url|https?://[\w.]*pypi", path.read_text(errors="ignore")):
                wrong.append(name)
    assert [w for w in wrong if w != label(Path(__file__))] == []


def twins():
    """Modules that exist under the same name in both stacks."""
    for path in FILES:
        if label(path).startswith("jax_impl/") and path.name != "__init__.py":
            inside = path.relative_to(ROOT / "jax_impl")
            if (ROOT / "torch_impl" / inside).exists():
                yield ".".join(inside.with_suffix("").parts)


def public_functions(module) -> dict[str, list[str]]:
    """Parameter names of the functions that a module defines, kernels' own tuning options aside."""
    return {
        name: list(inspect.signature(f).parameters)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("name", ["attention", "kernels.base", "kernels.naive"])
def test_twins_have_the_same_public_functions(name):
    modules = [__import__(f"{stack}.{name}", fromlist=["_"]) for stack in ("jax_impl", "torch_impl")]
    first, second = (public_functions(m) for m in modules)
    both = first.keys() & second.keys()
    assert {n: first[n] for n in both} == {n: second[n] for n in both}
    assert len(both) >= 2 or name == "kernels.base"


def test_context_parallelism_has_one_public_face():
    """The same names; the calls on data alike; what both makers of plans take stands in the same order."""
    first, second = (__import__(f"{stack}.context_parallel", fromlist=["_"]) for stack in ("jax_impl", "torch_impl"))
    assert set(second.__all__) - set(first.__all__) == {"Job", "Mesh"}  # JAX brings its own
    assert set(first.__all__) <= set(second.__all__)
    names = ("attention", "attend", "shard", "unshard", "positions", "token_mean", "make_plan", "plan_of")
    for name in names:
        one, other = (list(inspect.signature(getattr(m, name)).parameters) for m in (first, second))
        if name in ("make_plan", "plan_of"):
            one, other = ([p for p in own if p in against] for own, against in ((one, other), (other, one)))
        assert one == other and one, name


CONTRACT = {
    "forward": ["q", "k", "v", "operands", "scale", "out_dtype"],
    "backward": ["q", "k", "v", "out", "lse", "dout", "operands", "scale", "grad_dtype", "delta"],
    "prepare": ["problem", "device"],
}


def table(stack):
    return __import__(f"{stack}.kernels", fromlist=["_"])


@pytest.mark.parametrize("stack,name", [(s, n) for s in ("jax_impl", "torch_impl") for n in table(s).NAMES])
def test_kernel_records_keep_the_contract(stack, name):
    """The contract's parameters in its order; whatever a kernel adds has a default."""
    kernel = table(stack).get(name)
    for part, contract in CONTRACT.items():
        if (function := getattr(kernel, part)) is not None:
            parameters = inspect.signature(function).parameters
            assert [p for p in parameters if p in contract] == contract
            added = [p for n, p in parameters.items() if n not in contract]
            assert all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in added)


@pytest.mark.parametrize("stack", ["jax_impl", "torch_impl"])
def test_every_option_of_a_kernel_is_used_by_a_test(stack):
    """G4: an option that nobody ran was misspelt where it was read."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / stack).rglob("*.py"))
    for name in table(stack).NAMES:
        for parameter in inspect.signature(table(stack).get(name).prepare).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert re.search(rf"\b{parameter.name}\b\"?[=:]", tests), f"{stack} {name}: {parameter.name}"


def test_tables_name_what_they_hold():
    for stack in ("jax_impl", "torch_impl"):
        for name in table(stack).NAMES:
            kernel = table(stack).get(name)
            assert kernel.name == name and kernel.capability.source
            reason = kernel.available()
            assert reason is None or isinstance(reason, str) and reason
        with pytest.raises(ValueError, match="kernel: 'none' is none of"):
            table(stack).get("none")


def test_dependencies_are_pinned_and_pins_hold():
    """constraints.txt: names and versions only, one for every dependency, and those that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    plain = lambda name: re.split(r"[<>=\[ ]", name)[0].lower().replace("_", "-")  # noqa: E731
    pinned = {plain(name): version for name, version in pins.items()}
    for requirement in project["dependencies"] + project["optional-dependencies"]["test"]:
        assert plain(requirement) in pinned, requirement
    for requirement in project["dependencies"]:
        assert metadata.version(plain(requirement)).split("+")[0] == pinned[plain(requirement)], requirement
