"""The machine without one of its transitions: do walks, searches and the tests' cases notice?

Each statement that changes the machine's state, or has something done, is left out once, and each condition is held to
be true, and to be false. A mutant is noticed if a walk or a search finds a problem, raises an error, or does not end,
or if one of the cases fails: swarms on a virtual clock of which each leader, follower, freeze and lie is chosen.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from scripts.testing.meeting import search, walks, world
from spes_swarm.protocol.meeting import attempt, gathering, leading, meeting, state, view

CASES = (
    "tests/protocol/test_meeting.py",
    "tests/network/test_frozen_leaders.py",
    "tests/network/test_hostile_rendezvous.py",
    "tests/network/test_divisive_leaders.py",
)
MODULES = (view, gathering, attempt, state, leading, meeting)
_ROOT = Path(__file__).parents[3]
_SILENT = {"say", "describe", "__init__"}  # they only explain, or begin
_MOST_CPU_S = 600  # four times what the machine itself takes here
_STATES = 4_000  # of each search
# Walks of each kind: honest peers, hostile ones, faults, and whether they are freezes only.
_WALKS = 40
_SWARMS = (4, 1, 8, True), (4, 1, 8), (3, 0, 8), (2, 0, 8), (5, 0, 8), (5, 0, 8, True), (4, 0, 8, True), (6, 1, 4)
# The median, in swarms of two, from when both have joined to when both have the group: two messages, most of 20 ms.
_DELAY_S = 0.08


@dataclass(frozen=True)
class Mutant:
    """A changed statement."""

    module: str
    line: int
    change: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line}: {self.change}"


def mutants() -> Iterator[tuple[Mutant, str]]:
    """All mutants, each with the source of its module."""
    for module in MODULES:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        count = len(list(_places(ast.parse(source))))
        for index in range(count):
            tree = ast.parse(source)
            body, at, kind = list(_places(tree))[index]
            statement = body[at]
            text = ast.unparse(statement).splitlines()[0]
            if kind == "drop":
                body[at] = ast.copy_location(ast.Pass(), statement)
            else:
                assert isinstance(statement, ast.If)
                statement.test = ast.Constant(kind == "if True")
            mutated = ast.unparse(ast.fix_missing_locations(tree))
            yield Mutant(module.__name__, statement.lineno, f"{kind}: {text}"), mutated


def _places(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in _SILENT:
            continue
        for node in ast.walk(function):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if not isinstance(body, list):
                    continue
                for at, statement in enumerate(body):
                    if isinstance(statement, ast.If):
                        yield body, at, "if True"
                        yield body, at, "if False"
                    elif _changes_something(statement):
                        yield body, at, "drop"


def _changes_something(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        called = statement.value
        is_call = isinstance(called, ast.Call)
        if isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute) and called.func.attr in _SILENT:
            return False
        return is_call
    if isinstance(statement, ast.Assign):  # to drop that of a local name would be an error, which is easy to notice
        return not all(isinstance(part, ast.Name) for target in statement.targets for part in _parts(target))
    return isinstance(statement, ast.AugAssign | ast.Delete | ast.Raise | ast.For)


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def check() -> str | None:
    """Walks and searches briefly; returns the first problem."""
    delays = []
    for seed in range(_WALKS):
        for swarm in _SWARMS:
            problems, walked = walks.walk(seed, *swarm)
            if problems:
                return problems[0].what
            delays += walked.delays if swarm[0] == 2 else []
    if (delay_s := statistics.median(delays)) > _DELAY_S:
        return f"two peers have their group after {delay_s:.2f} s"
    for peers, faults in ((2, {"freezes": 1, "losses": 1}), (2, {"crashes": 1, "losses": 1}), (3, {"crashes": 1})):
        found = search.search(peers, most=_STATES, **faults)
        if found.problem is not None:
            return found.problem
    return None


def notice(mutant: Mutant, source: str) -> str | None:
    """Returns how a mutant was noticed; None: it was not."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(mutant.module, source, sending))
    process.start()
    sending.close()
    try:
        found: str | None = receiving.recv()
        return found
    except EOFError:
        return "it does not end"
    finally:
        process.kill()
        process.join()


def notice_in_cases(mutant: Mutant, source: str) -> bool:
    """Returns True if one of the tests' cases fails with a mutant, or does not end.

    Raises:
        RuntimeError: the cases could not be run.
    """
    with tempfile.TemporaryDirectory() as name:
        for package in ("spes_swarm", "scripts", "tests"):
            shutil.copytree(_ROOT / package, Path(name) / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(_ROOT / "pyproject.toml", name)
        (Path(name) / mutant.module.replace(".", "/")).with_suffix(".py").write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CASES]
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=name, env=environment, capture_output=True, timeout=1800, check=False)
        except subprocess.TimeoutExpired:
            return True
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 1


def _try(module: str, source: str, sending: object) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    try:
        _install(module, source)
        found = check()
    except Exception as exc:  # whatever it is, it was noticed
        found = f"{type(exc).__name__}: {exc}"
    sending.send(found)  # type: ignore[attr-defined]


def _install(changed: str, source: str) -> None:
    """Replaces a module by its mutant, and those that import from it by themselves, loaded again."""
    for original in MODULES:
        assert original.__file__ is not None
        text = source if original.__name__ == changed else Path(original.__file__).read_text(encoding="utf-8")
        fresh = ModuleType(original.__name__)
        fresh.__file__ = original.__file__
        sys.modules[original.__name__] = fresh
        exec(compile(text, original.__file__, "exec"), vars(fresh))
    for user in (search, world, walks):
        for name in vars(user):
            for original in MODULES:
                if getattr(vars(user)[name], "__module__", None) == original.__name__:
                    setattr(user, name, getattr(sys.modules[original.__name__], name))
