"""Measure the house: rooms, circles, names, docstrings. `python -m tests.house` prints the table.

`tests/test_house.py` holds each figure to a ceiling that only goes down. It looks at
the tree as it stands; imports under TYPE_CHECKING count for circles of files, not for circles of folders.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.house_words import FRAGMENTS, NOT_NOUNS, VERBS

ROOT = Path(__file__).parent.parent
PACKAGES = ("events", "unicrond", "agents", "replay")
#: Those that are linked into `unicrond`.
LINKED = ("events", "agents", "replay")
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 450

Graph = Mapping[str, set[str]]


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each source file, by its path from the root."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    }


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return every node of a tree; walking one takes as long as parsing it."""
    return tuple(ast.walk(tree))


def package_files(package: str) -> list[ast.Module]:
    """Return the syntax trees of one package."""
    return [tree for name, tree in sources().items() if name.startswith(f"{package}/")]


# --- names and docstrings ------------------------------------------------------------------------


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield every name that the tree binds: locals, arguments, attributes, functions, classes."""
    for node in nodes(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) if name not in ("self", "cls"):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def share_of_odd_names(package: str) -> float:
    """Return the percentage of bindings whose whole name is a participle or a pronoun."""
    names = Counter(name.strip("_").lower() for tree in package_files(package) for name in bindings(tree))
    return 100 * sum(count for name, count in names.items() if name in NOT_NOUNS) / names.total()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def first_words(package: str) -> list[tuple[str, str]]:
    """Return the first two words of every function's docstring, in lower case."""
    found = []
    for tree in package_files(package):
        for function in functions(tree):
            words = (ast.get_docstring(function) or "").lower().split()
            if words:
                found.append((words[0].strip("`'\".,:;()*"), words[1] if len(words) > 1 else ""))
    return found


def is_verb(word: str, following: str) -> bool:
    """Say whether a docstring that begins so begins with a verb, imperative or third person; "record of" is a noun."""
    stems = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return following != "of" and any(stem in VERBS for stem in stems)


def docstring_shares(package: str) -> tuple[float, float]:
    """Return the percentages of function docstrings that begin with a verb, and with a fragment."""
    openers = first_words(package)
    verbs = sum(is_verb(*words) for words in openers)
    fragments = sum(word in FRAGMENTS for word, _ in openers)
    return 100 * verbs / len(openers), 100 * fragments / len(openers)


def share_documented(package: str) -> float:
    """Return the percentage of public functions that have a docstring."""
    public = [f for tree in package_files(package) for f in functions(tree) if not f.name.startswith("_")]
    return 100 * sum(ast.get_docstring(function) is not None for function in public) / len(public)


def repeated_class_names() -> dict[str, list[str]]:
    """Return the class names that more than one file defines, with these files."""
    where: dict[str, list[str]] = defaultdict(list)
    for name, tree in sources().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name)
    return {name: files for name, files in where.items() if len(files) > 1}


# --- rooms ---------------------------------------------------------------------------------------


def module_name(name: str) -> str:
    """Return the dotted name of a source file, or of a test."""
    dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"unicrond.{dotted}" if dotted.split(".")[0] in LINKED else dotted


def _imported(tree: ast.AST, *, for_types: bool) -> Iterator[str]:
    """Yield the dotted names that a file imports. `for_types`: those under TYPE_CHECKING too."""
    hidden: set[int] = set()
    if not for_types:
        for node in nodes(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                hidden.update(id(inner) for inner in ast.walk(node))
    for node in nodes(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def file_graph(*, for_types: bool) -> Graph:
    """Return which source files each source file imports."""
    by_module = {module_name(name): name for name in sources()}
    graph: dict[str, set[str]] = {}
    for name, tree in sources().items():
        targets = set()
        for dotted in _imported(tree, for_types=for_types):
            target = by_module.get(dotted) or by_module.get(dotted.rpartition(".")[0])
            if target is not None and target != name:
                targets.add(target)
        graph[name] = targets
    return graph


def room_graph() -> Graph:
    """Return which folders each folder's files import."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in file_graph(for_types=False).items():
        room = name.rpartition("/")[0]
        graph[room] |= {target.rpartition("/")[0] for target in targets} - {room}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach each other, each of two or more (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in order:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == order[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                components.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return components


def files_by_room() -> Counter[str]:
    """Return how many files each folder holds, doors (`__init__`) left out."""
    return Counter(name.rpartition("/")[0] for name in sources() if not name.endswith("/__init__.py"))


def short_files() -> list[str]:
    """Return the files of at most 60 lines, doors left out."""
    return [
        name for name in sources()
        if not name.endswith("/__init__.py") and len((ROOT / name).read_text().splitlines()) <= 60
    ]  # fmt: skip


def import_lines() -> float:
    """Return how many of 100 lines of source are import statements: an interface that leaks shows here."""
    count = sum(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in sources().values()
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return 100 * count / sum(len((ROOT / path).read_text().splitlines()) for path in sources())


def too_long() -> dict[str, int]:
    """Return the lines of each file and function over its limit; a function as "file:function"."""
    long = {}
    for name, tree in sources().items():
        lines = len((ROOT / name).read_text().splitlines())
        if lines > FILE_LINES_MAX:
            long[name] = lines
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                long[f"{name}:{function.name}"] = lines
    return long


def figures() -> dict[str, float]:
    """Return every figure that has a ceiling, by name."""
    measured: dict[str, float] = {
        "circles of folders": len(circles(room_graph())),
        "files in a circle of files": sum(map(len, circles(file_graph(for_types=True)))),
        "most files in one room": max(files_by_room().values()),
        "class names with several meanings": len(repeated_class_names()),
        "files of at most 60 lines": len(short_files()),
        "lines of imports, %": import_lines(),
    }
    for package in PACKAGES:
        verbs, fragments = docstring_shares(package)
        measured[f"{package}: names that are participles or pronouns, %"] = share_of_odd_names(package)
        measured[f"{package}: docstrings without a verb first, %"] = 100 - verbs
        measured[f"{package}: docstrings that begin with a fragment, %"] = fragments
        measured[f"{package}: public functions without a docstring, %"] = 100 - share_documented(package)
    return measured


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{figure:8.2f}  {name}")
    for circle in [*circles(room_graph()), *circles(file_graph(for_types=True))]:
        print("circle:", *circle)
    for name, files in sorted(repeated_class_names().items()):
        print("class:", name, *files)
