"""When and how this peer publishes the run's model while it trains.

Publishing runs in a separate process at the lowest priority (`python -m spes_swarm.publish`), which reads this peer's
newest checkpoint and dies with this peer. protocol/members/election.py decides which of several volunteers publishes.
What is already published is looked up at the target, so a volunteer that is silent or lies cannot stop the others. The
n-th in line after the first publishes a round itself if it is n periods overdue and not at the target; it waits two
periods longer if the first announces an upload.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import IO, Any

from spes_swarm.base import log
from spes_swarm.base.lifetime import die_with_parent
from spes_swarm.base.rate_limit import ASSUMED_MBPS, DURING_ROUNDS_SHARE
from spes_swarm.config.peer import PeerConfig
from spes_swarm.metrics import events
from spes_swarm.port.commands import Commands, Port
from spes_swarm.protocol.members.election import target_digest
from spes_swarm.protocol.members.round_metrics import notes_of
from spes_swarm.publishing.client import without_advice
from spes_swarm.storage.checkpoint_writing import Written
from spes_swarm.storage.metrics_file import Metrics

_MIN_RETRY_S, _MAX_RETRY_S = 30.0, 3600.0
_POLL_S = 0.2
_MAX_OUTPUT = 64 * 1024


@dataclass(eq=False)
class Publishing:
    """Publishes the model to `peer.publish_to` every `peer.publish_every` rounds."""

    network: Port  # announces this volunteer, and provides the view of the others
    metrics: Metrics  # gets `publish` events, and `fault` events of the kind `publish`
    _: KW_ONLY
    peer: PeerConfig
    run_id: str
    peer_id: str
    say: Callable[[str], None]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _saving: tuple[int, Future[Written]] | None = field(default=None, init=False)  # the round due, its checkpoint
    _output: IO[bytes] | None = field(default=None, init=False)
    _published: int = field(default=-1, init=False)  # the newest round known to be published
    _has_failed: bool = field(default=False, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _retry_s: float = field(default=_MIN_RETRY_S, init=False)
    _leaving: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert self.peer.publish_to is not None
        self._target = self.peer.publish_to
        self._digest = target_digest(self.run_id, self._target)
        self._volunteer()

    def _volunteer(self) -> None:
        """Announces whether this peer volunteers. After a failure it does so only once it publishes again."""
        publishing = self._process is not None
        stands = publishing or not self._has_failed
        self.network.submit(Commands.volunteer, target=self._digest if stands else None, publishing=publishing)

    def consider(self, round_number: int, save: Callable[[], Future[Written]]) -> None:
        """Calls `save` if a publication is due and it is this peer's turn; `poll` starts it once the checkpoint has
        been written.

        A peer that is not first in line waits until a round is overdue. It then publishes its newest round, unless
        the target already has that round or a newer one.

        Raises:
            CheckpointError: from `save`.
        """
        view = self.network.view
        if view is None or self._process is not None or self._saving is not None or time.monotonic() < self._retry_at:
            return
        due = (round_number // self.peer.publish_every - view.publishing_periods) * self.peer.publish_every
        if due <= max(self._published, 0):
            return
        self._saving = due, save()
        self.poll()

    def _start(self, due: int) -> None:
        try:
            self._launch(due)
        except (OSError, subprocess.SubprocessError) as exc:  # this machine is short of processes, memory or disk
            if self._output is not None:
                self._output.close()
            self._fail(f"publishing cannot start: {getattr(exc, 'strerror', None) or exc}")
        self._volunteer()

    def _launch(self, due: int) -> None:
        peer = self.peer
        # Part of the bandwidth that rounds need as well.
        upload_mbps = peer.publish_mbps or DURING_ROUNDS_SHARE * (peer.upload_mbps or ASSUMED_MBPS)
        command = [sys.executable, "-m", "spes_swarm.publish", peer.output_dir, "--to", self._target]
        command += ["--background", "--json", "--due", str(due), "--upload-mbps", str(upload_mbps)]
        command += ["--log", log.context.run, log.context.peer, peer.log_level]
        if peer.publish_keep is not None:
            command += ["--keep", str(peer.publish_keep)]
        parent = os.getpid()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as the process runs
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer
            preexec_fn=lambda: die_with_parent(parent),
        )

    def poll(self) -> None:
        """Starts a publication whose checkpoint has been written, and handles one that has ended; cheap to call while
        neither is the case.
        """
        if self._saving is not None and self._saving[1].done():
            (due, saved), self._saving = self._saving, None
            # Otherwise it could not be written, or an earlier one was still being written: the next round decides.
            if saved.exception() is None and saved.result().round >= due:
                self._start(due)
        if self._process is None or self._process.poll() is None:
            return
        lines = self._last_lines()
        process, self._process = self._process, None
        # Libraries may print as well, even after the result.
        found = (summary for line in reversed(lines) if (summary := _summary(line)) is not None)
        summary = next(found, None) if process.returncode == 0 else None
        if summary is None:
            reasons = [line.removeprefix("publish: ") for line in lines if line.startswith("publish: ")]
            ended = f"publishing {_ending(process.returncode)}"
            self._fail(reasons[-1] if reasons else ": ".join([ended, *lines[-1:]]) + log.where_to_read())
            self._volunteer()
            return
        self._has_failed = False
        self._volunteer()
        self._retry_s = _MIN_RETRY_S
        self._published = max(self._published, int(summary["round"]))
        if summary["status"] == "published":
            fields: dict[str, Any] = {name: summary.get(name) for name in notes_of(events.Publish)}
            self.metrics.write(events.Publish(**fields))
            self.say(f"round {summary['round']} is published")

    def _fail(self, reason: str) -> None:
        """Reports why a round was not published, and sets the time of the next attempt."""
        self._has_failed = True
        detail = without_advice(reason[-500:])
        self.metrics.write(events.Fault(kind="publish", peer=self.peer_id, detail=detail))
        follows = "it is not tried again" if self._leaving else f"publishing is tried again in {self._retry_s:.0f} s"
        self.say(f"{detail}; {follows}")
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def _last_lines(self) -> list[str]:
        assert self._output is not None
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_OUTPUT))
            return output.read().decode(errors="replace").strip().splitlines()

    def publish_last(self, round_number: int, stop: threading.Event, timeout_s: float) -> None:
        """Publishes the last round of a run even if it is not due; its checkpoint has been written.

        Volunteers take turns: a peer that is not first in line waits until those before it have left, or for half of
        `timeout_s`, and then publishes the round unless the target has it. A failure is reported and retried until
        `timeout_s` have passed.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        while time.monotonic() < deadline and not stop.is_set():
            self.poll()
            if self._process is None:
                if self._published >= round_number:
                    return
                view, now = self.network.view, time.monotonic()
                is_next = (view is not None and view.publishing_periods == 0) or now >= started + timeout_s / 2
                if is_next and now >= self._retry_at:
                    self._start(round_number)
            stop.wait(_POLL_S)

    def stop(self, wait_s: float, stop: threading.Event) -> None:
        """Waits up to `wait_s`, or until `stop` is set, for a running publication, then kills it; the next one resumes
        from there.
        """
        self._leaving = True
        if wait_s > 0:
            self.poll()  # the last checkpoint may have been one to publish
        if self._process is None:
            return
        deadline = time.monotonic() + wait_s
        if wait_s > 0 and self._process.poll() is None:
            self.say("waiting for the publication to finish; if this peer is stopped before, the next one resumes it")
        while self._process.poll() is None and time.monotonic() < deadline and not stop.is_set():
            stop.wait(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._last_lines()  # closes the output
            self._process = None  # not a failure
        self.poll()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    killed = f"was killed by signal {-code}"
    return f"{killed}, as by a system that runs out of memory" if -code == signal.SIGKILL else killed


def _summary(line: str) -> dict[str, Any] | None:
    try:
        summary = json.loads(line)
    except ValueError:
        return None
    known = isinstance(summary, dict) and isinstance(summary.get("round"), int)
    return summary if known and summary.get("status") in ("published", "unchanged") else None
