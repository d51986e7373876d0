"""A started peer, which can be followed for hours through its metrics."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from scripts.testing.chaos.report import Attempt
from scripts.testing.local_peer import Event, LocalPeer

# Only a hostile member can be named for these; any peer can lose its connection, or be late on a busy machine.
_LIES = frozenset({"clipped", "duty", "nonfinite", "norm", "proven", "signature", "weight"})
_NUM_PROCESSES = 3  # the trainer, the network process, p2pd


def accuses(fault: Event) -> bool:
    """Returns True if a `fault` event names a liar, or one without duty."""
    return fault["kind"] in _LIES


class ChaosPeer:
    """One start of a peer, and what it has reported so far."""

    def __init__(self, name: str, process: LocalPeer, host: int | None) -> None:
        self.name = name
        self.process = process
        self.host = host  # in the local network
        self.peer_id = ""
        self.run_id = ""
        self.rounds: dict[int, Event] = {}  # the `round` events by number
        self.commits: dict[int, float] = {}  # Unix time of its commit of each of them
        self.groups: dict[int, float] = {}  # Unix time at which the newest group of each round formed
        # Accusations since the last check; all peers here are honest.
        self.accusations: list[str] = []
        self.steps = 0  # local steps since its last commit
        self.synced_at: float | None = None
        self.told_to_end = False  # its end is expected
        self.stopped = False
        self.over = False  # it has ended, and all of its metrics have been read
        self.side = ""  # its side during a cut; "" for none
        self._steps_of = -1
        self._processes: list[psutil.Process] = []

    @property
    def directory(self) -> Path:
        """Its output directory, which outlives the process."""
        return self.process.output_dir

    @property
    def alive(self) -> bool:
        """True if its main process runs."""
        return self.process.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of its main process; negative for a signal."""
        return self.process.process.poll()

    @property
    def last_round(self) -> int:
        """The newest round that it has reported as committed."""
        return max(self.rounds, default=0)

    @property
    def round(self) -> int:
        """The newest round that it has committed; its steps show a commit before the round's event does."""
        return max(self.last_round, self._steps_of)

    def committed_before(self, at: float) -> int:
        """The newest round that it had committed at a time, according to its reports so far."""
        return max((number for number, committed in self.commits.items() if committed <= at), default=0)

    def read(self) -> list[Event]:
        """Reads the events since the last call; returns the `round` events among them."""
        rounds = []
        for event in self.process.new_events():
            match event["event"]:
                case "step":
                    self.steps = self.steps + 1 if event["round"] == self._steps_of else 1
                    self._steps_of = event["round"]
                case "group":
                    self.groups.pop(event["round"], None)  # an earlier attempt; the newest goes last
                    self.groups[event["round"]] = event["time"]
                case "round":
                    number = event["round"]
                    self.rounds[number] = event
                    # The event is written once the traffic is known, possibly seconds after the commit.
                    grouped = self.groups.get(number)
                    self.commits[number] = event["time"] if grouped is None else grouped + event["exchange_seconds"]
                    rounds.append(event)
                case "join":
                    self.run_id, self.peer_id = event["run_id"], event["peer_id"]
                case "sync":
                    self.synced_at = event["time"]
                case "fault" if accuses(event):
                    self.accusations.append(f"of {event['peer']}: {event['kind']}: {event['detail']}")
        return rounds

    def attempts(self) -> list[Attempt]:
        """Its attempts at rounds that formed a group, committed or not."""
        attempts = []
        # An attempt without a commit ends where the next one begins.
        ends = [*list(self.groups.values())[1:], float("inf")]
        for (number, grouped), ended in zip(self.groups.items(), ends, strict=True):
            event = self.rounds.get(number)
            if event is None:
                attempts.append(Attempt(grouped, grouped, ended))
            else:
                began = grouped - float(event["group_seconds"])
                attempts.append(Attempt(began, grouped, grouped + float(event["exchange_seconds"])))
        return attempts

    def processes(self) -> list[psutil.Process]:
        """Main process, network process and p2pd, as far as they have started; cached, as finding them is slow."""
        if len(self._processes) < _NUM_PROCESSES and self.alive:
            tree = self.process.tree()
            # A child has its parent's name until it executes p2pd.
            if len(tree) == _NUM_PROCESSES and _name(tree[-1]) == "p2pd":
                self._processes = tree
            return tree
        return self._processes

    @property
    def is_complete(self) -> bool:
        """True if all of its processes have been started."""
        return len(self.processes()) >= _NUM_PROCESSES

    def signal(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def last_words(self) -> str:
        """The last line that it printed."""
        return (self.process.text().strip().splitlines() or [""])[-1]

    def state(self) -> str:
        """A description of its state, for the record of a problem."""
        lines = [
            f"{self.name}: round {self.last_round}, {self.steps} steps since; exit code {self.exit_code}",
            f"groups: {dict(list(self.groups.items())[-5:])}",
            f"commits: {dict(list(self.commits.items())[-5:])}",
            self.process.tail(),
        ]
        for process in self.processes():
            with suppress(psutil.Error):
                lines.append(f"process {process.pid} {process.name()}: {process.status()}, {process.cpu_times()}")
        return "\n".join(lines)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
