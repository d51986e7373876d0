"""Prints the largest pieces of the package, to look for a second concept inside them. It is a report, not a limit.

.venv/bin/python -m scripts.structure_report
.venv/bin/python -m scripts.structure_report tests --top 5
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def measure(folder: Path) -> dict[str, Counter[str]]:
    """Returns the sizes of everything below a folder: of each kind of piece, by where it is."""
    sizes: dict[str, Counter[str]] = {
        "longest files (lines)": Counter(),
        "fullest folders (modules besides __init__)": Counter(),
        "longest functions (lines)": Counter(),
        "widest classes (attributes)": Counter(),
    }
    files, folders, functions, classes = sizes.values()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        files[str(path)] = len(source.splitlines())
        folders[str(path.parent)] += path.name != "__init__.py"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                functions[f"{path}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
            elif isinstance(node, ast.ClassDef):
                classes[f"{path}:{node.lineno} {node.name}"] = len(set(_attributes(node)))
    return sizes


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yields the names of a class's fields, and of what its methods assign to `self`."""
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in ast.walk(statement):
                    match part:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("spes_swarm"))
    parser.add_argument("--top", type=int, default=10, help="how many of each kind to print (default: 10)")
    args = parser.parse_args()
    for kind, sizes in measure(args.folder).items():
        print(kind)
        for where, size in sizes.most_common(args.top):
            print(f"{size:6}  {where}")


if __name__ == "__main__":
    main()
