"""Ports without a network process: commands are carried out in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import SwarmView

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class LocalPort(Port):
    """Carries out commands by the coroutines of `executor` that have their names.

    Args:
        executor: has those of port.commands.Commands that are expected, and `called_round`.
        in_threads: commands run beside the caller, as in a network process; otherwise before `submit` returns.

    Attributes:
        unanswered: names of commands that are carried out without an answer (not in threads).
    """

    def __init__(self, executor: Any, *, in_threads: bool = False) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(4) if in_threads else None
        self.unanswered: set[str] = set()

    @property
    def view(self) -> SwarmView | None:
        """See Port; here always the newest."""
        return self.ask(Commands.view, None)

    @property
    def called_round(self) -> int:
        """See Port."""
        return int(self._executor.called_round)

    def submit(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Result]:
        """See Port."""

        def execute() -> _Result:
            result: _Result = asyncio.run(getattr(self._executor, command.__name__)(*args, **kwargs))
            return result

        if self._threads is not None:
            return self._threads.submit(execute)
        future: Future[_Result] = Future()
        try:
            result = execute()
            if command.__name__ not in self.unanswered:
                future.set_result(result)
        except Exception as exc:  # as in a network process, it belongs to the caller
            future.set_exception(exc)
        return future

    def ask(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """See Port."""
        return self.submit(command, *args, **kwargs).result(wait_s)
