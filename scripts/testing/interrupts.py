"""How a script ends at a Ctrl-C."""

from __future__ import annotations

import sys
from types import TracebackType

from spes_swarm.base.arguments import handle_interrupts, show_any_text


def report_interrupt(program: str) -> None:
    """Makes an unhandled Ctrl-C end the program with one line instead of a traceback; call it before slow imports."""
    show_any_text()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{program}: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report
    handle_interrupts(program)
