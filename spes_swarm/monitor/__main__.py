"""`python -m spes_swarm.monitor`: shows a run, given the address of any of its peers.

It only reads the signed records in the run's DHT, and proofs of lies, so any number of monitors can run anywhere, and
no peer depends on them. See options.py for the options, and state.py for what is shown.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spes_swarm.base.arguments import end_program, show_any_text, stop_signals
from spes_swarm.base.errors import NetworkProcessError, UserError
from spes_swarm.base.log import divert, quiet_import_of_hivemind
from spes_swarm.base.wording import plural

if TYPE_CHECKING:
    from rich.console import Console

    from spes_swarm.monitor.collector import Collector
    from spes_swarm.monitor.options import Options
    from spes_swarm.monitor.state import StateSource

# One read may miss records; the next ones find them.
_ONCE_LOOKS = 3
_ONCE_PAUSE_S = 0.5
_PROOFS_S = 20.0  # how long `--faults` waits for proofs


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    try:
        from spes_swarm.monitor.options import parse_options  # with pydantic, which takes long enough for a Ctrl-C

        options = parse_options(arguments)
        show_any_text()
        return asyncio.run(_until_stopped(_replay(options) if options.replay is not None else _watch(options)))
    except UserError as exc:
        # The message may quote peers: keep it on one line, without control characters.
        print("monitor: " + "".join(c if c.isprintable() else " " for c in str(exc)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before its handler is installed
        return 0
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:  # the machine's limits
        print(f"monitor: {exc}", file=sys.stderr)
        return 2
    except NetworkProcessError as exc:
        print(f"monitor: {exc}; restart the monitor", file=sys.stderr)
        return 1


async def _until_stopped(work: Coroutine[Any, Any, None]) -> int:
    """Runs `work` until it is done or is told to stop; returns the exit code."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    return 0


# Replay.


async def _replay(options: Options) -> None:
    from spes_swarm.monitor.history_file import read_history
    from spes_swarm.monitor.source import HeldState

    assert options.replay is not None
    state, history = read_history(options.replay)
    if options.plot is not None:
        from spes_swarm.monitor.views.plot import plot_run

        plot_run(state, history, options.plot)
        _console().print(f"{plural(len(history), 'round')} drawn: {options.plot}", markup=False, highlight=False)
        return
    source = HeldState(state, history)
    with _listen(options) as listener:
        _print_once(options, source)
        if listener is not None:
            await _serve(source, listener)


# Live.


async def _watch(options: Options) -> None:
    from spes_swarm.monitor.history import History

    with ExitStack() as cleanup:
        listener = cleanup.enter_context(_listen(options))
        if options.proofs is not None:
            options.proofs.mkdir(parents=True, exist_ok=True)
        history = History(options.history) if options.history is not None else None
        if history is not None:
            cleanup.callback(history.close)
        # hivemind imports torch, which takes seconds: a mistyped flag or a replay must not wait for it.
        with quiet_import_of_hivemind():
            from spes_swarm.monitor.collector import Collector
            from spes_swarm.monitor.watcher import NetworkOptions, open_watcher
            from spes_swarm.network.link.wire import report_loop_errors
        from spes_swarm.protocol.admission.grants import read_invitation
        from spes_swarm.protocol.members.identity import Identity
        from spes_swarm.storage.invitations import can_be_passed_on
        from spes_swarm.storage.run_directory import locked_identity

        divert("hivemind")
        identity_path = options.identity
        if identity_path is None:
            identity_path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="spes-monitor-"))) / "key"
        identity_path = identity_path.absolute()
        peer_id = Identity.load_or_create(identity_path).peer_id
        invitation = read_invitation(options.invitation) if options.invitation is not None else None
        network = NetworkOptions(
            initial_peers=options.initial_peers,
            identity_path=identity_path,
            host_maddrs=options.host_maddrs,
            announce_maddrs=options.announce_maddrs,
            is_entry=options.bootstrap,
            run_id=options.run_id or (invitation.run_id if invitation is not None else None),
            timeout_s=options.timeout_s,
            admission=invitation.admit(peer_id) if invitation is not None else b"",
            to_pass_on=options.invitation if invitation is not None and can_be_passed_on(invitation) else None,
        )
        cleanup.enter_context(locked_identity(identity_path, peer_id, "each monitor needs its own"))
        remembered = history.manifest() if history is not None else None
        report_loop_errors(lambda detail: print(f"monitor: {detail}", file=sys.stderr))
        watcher = await open_watcher(network, remembered, history.addresses() if history is not None else [])
        try:
            await _show(options, Collector(watcher, history, options.refresh_s, options.proofs), listener)
        finally:
            report_loop_errors(lambda detail: None)  # whatever is still under way then fails
            await watcher.stop()


async def _show(options: Options, collector: Collector, listener: socket.socket | None) -> None:
    try:
        if options.once or options.faults:
            await _look_once(collector)
            if options.faults:
                await collector.evidence.settled(_PROOFS_S)
                await collector.refresh()
            _print_once(options, collector.source)
        else:
            await _follow(options, collector, listener)
    finally:
        collector.evidence.stop()


async def _look_once(collector: Collector) -> None:
    for left in reversed(range(_ONCE_LOOKS)):
        await collector.refresh()
        if left:
            await asyncio.sleep(_ONCE_PAUSE_S)


async def _follow(options: Options, collector: Collector, listener: socket.socket | None) -> None:
    from spes_swarm.monitor.views.terminal import show_lines, show_live

    console = _console()
    await collector.refresh()
    works: list[Coroutine[Any, Any, None]] = []
    if options.log is not None:
        from spes_swarm.monitor.views.tracking import follow, open_swarm_tracker
        from spes_swarm.storage.trackers import Quiet

        tracker = open_swarm_tracker(options.log, collector.source.state().run.run_id)
        quiet = Quiet(tracker, lambda text: print(f"monitor: {text}", file=sys.stderr, flush=True))
        works.append(follow(collector.source, quiet))
    if listener is not None:
        works.append(_serve(collector.source, listener))
    if options.json:
        works.append(_show_json(collector.source, sys.stdout))
    elif console.is_terminal:
        works.append(show_live(collector.source, console))
    else:
        works.append(show_lines(collector.source, console))
    await _together([collector.run(), *works])


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all until one ends, then cancels the others; raises the error that ended it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Output.


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_once(options: Options, source: StateSource) -> None:
    if options.faults:
        from spes_swarm.monitor.views.faults import faults_text, print_faults

        if options.json:
            print(faults_text(source.state()), flush=True)
        else:
            print_faults(_console(), source.state())
        return
    if options.json:
        from spes_swarm.monitor.state import to_text

        print(to_text(source.state()), flush=True)
        return
    from spes_swarm.monitor.views.terminal import print_once

    print_once(_console(), source.state(), source.history())


async def _show_json(source: StateSource, output: TextIO) -> None:
    from spes_swarm.monitor.state import to_text

    while True:
        print(to_text(source.state()), file=output, flush=True)
        await source.wait_for_change(60.0)


def _listen(options: Options) -> AbstractContextManager[socket.socket | None]:
    """Binds the page's address before any slow step; browsers wait until the page is served."""
    if options.web is None:
        return nullcontext()
    try:
        from spes_swarm.monitor.views.web import listen
    except ImportError as exc:
        needed = "starlette, uvicorn and prometheus-client"
        raise UserError(f"--web needs {needed}: pip install 'spes-swarm[monitor]'") from exc
    return listen(*options.web)


async def _serve(source: StateSource, listener: socket.socket) -> None:
    from spes_swarm.monitor.views.web import serve

    await serve(source, listener, announce=lambda address: print(f"monitor: {address}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    end_program(main())
