"""A swarm of local peers into which faults are injected.

Before a fault all peers have committed a round together, and an undisturbed one after it, which gives the pace. After
the fault, all peers that still run must commit another round, and then one in a group of all peers.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from scripts.testing.chaos.peer import ChaosPeer
from scripts.testing.chaos.report import (
    Commit,
    Outcome,
    Problem,
    Report,
    Totals,
    UndisturbedRounds,
    phase_at,
    totals,
)
from scripts.testing.chaos.schedule import ENDING, STARTING, Fault, Kind, Phase, Role, split_in_two
from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_network import LocalNetwork
from scripts.testing.local_peer import LocalPeer, LocalPeerError
from spes_swarm.base.errors import SwarmError
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.protocol.meeting.view import rank
from spes_swarm.storage.run_directory import RunDirectory

_POLL_S = 0.05
_AIM_S = 0.005  # while waiting for the time of a fault
_START_S = 120.0  # for the first peers to start training
_END_S = 30.0  # for a peer that lost a process or got SIGTERM to end
_CALM_ROUNDS = 3  # before the first fault
_SYNCING = "fetching the swarm's reference"


class HangError(SwarmError):
    """An expected event did not happen in time."""


class ChaosSwarm:
    """Starts peers, injects faults and watches the other peers; a context manager that ends all of them.

    A wait longer than `hang_s` is a hang. Cuts need a `network`; without one all peers are on 127.0.0.1.
    """

    def __init__(
        self, directory: Path, run: Mapping[str, Any], *, hang_s: float = 90.0, network: LocalNetwork | None = None
    ) -> None:
        self.pace = UndisturbedRounds()
        self.outcomes: list[Outcome] = []
        self.reports: list[Report] = []
        self._directory = directory
        later = run["round"].get("inner_steps_later", ())
        self._clock = RoundClock(run["round"]["inner_steps"], tuple((step, count) for step, count in later))
        self._hang_s = hang_s
        self._network = network
        self._config = directory / "run.yaml"
        self._config.write_text(yaml.safe_dump({"run": dict(run)}), encoding="utf-8")
        self._peers: list[ChaosPeer] = []  # all started so far
        self._gone: list[Path] = []  # output directories of peers that have ended
        self._processes: set[psutil.Process] = set()  # all seen so far
        self._killed: set[int] = set()  # network processes killed since the last start, which left their sockets behind
        self._resume: list[tuple[float, ChaosPeer]] = []  # when stopped peers are continued
        self._is_cut = False
        self._healed_at = 0.0
        self._problems: list[Problem] = []
        # Sockets are in the temporary directory. A private one, with a short path, shows which are left over.
        self._temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._own_temporary = os.environ.get("TMPDIR")

    def __enter__(self) -> Self:
        os.environ["TMPDIR"] = str(self._temporary)
        return self

    def __exit__(self, *details: object) -> None:
        """Kills all peers."""
        for peer in self._peers:
            if peer.alive:
                peer.process.__exit__()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._own_temporary is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = self._own_temporary

    # Starting peers.

    def running(self) -> list[ChaosPeer]:
        """Peers that take part, or are about to."""
        return [peer for peer in self._peers if peer.alive and not peer.told_to_end and not peer.stopped]

    def found(self, num_peers: int) -> None:
        """Starts the first peers and measures their pace.

        Raises:
            HangError: they did not begin to train; start.txt in the directory has details.
            LocalPeerError: the first one did not announce its address.
        """
        together = ["--wait-for-peers", str(num_peers)]
        first = self._start(self._directory / "peer0", "--config", str(self._config), *together)
        address = self._address_of(first)
        for i in range(1, num_peers):
            self._start(self._directory / f"peer{i}", "--initial-peers", address, *together)
        try:
            number = self._await_together(0, _START_S)
            for _ in range(_CALM_ROUNDS):
                number = self._calm_round(number)
        except HangError:
            self._record("start", self._peers)
            raise

    def _start(self, directory: Path, *arguments: str) -> ChaosPeer:
        host, address, launch = None, "127.0.0.1", ForkServer()
        if self._network is not None:
            used = {peer.host for peer in self._peers if peer.alive}
            host = next(number for number in range(self._network.num_hosts) if number not in used)
            address, launch = self._network.address(host), ForkServer(self._network.namespace(host))
        self._killed.clear()  # the newcomer removes their sockets
        starts = sum(peer.directory == directory for peer in self._peers)
        name = f"{directory.name}#{starts + 1}" if starts else directory.name
        common = ["--host-maddrs", f"/ip4/{address}/tcp/0", "--num-threads", "1"]
        peer = ChaosPeer(name, LocalPeer(directory, [*common, *arguments], launch), host)
        self._peers.append(peer)
        return peer

    def _address_of(self, peer: ChaosPeer) -> str:
        host = "127.0.0.1" if self._network is None or peer.host is None else self._network.address(peer.host)
        return peer.process.address(host=host)

    def _newcomer(self, kind: Kind, rng: random.Random) -> ChaosPeer:
        """Starts a new peer, or restarts one that has ended, through one that runs.

        Half of the restarted peers get no address, provided that one which they knew before is still valid.
        """
        through = self._address_of(rng.choice(self.running()))
        if kind is Kind.RETURN and self._gone:
            directory = self._gone.pop(rng.randrange(len(self._gone)))
            known = RunDirectory(directory).known_peers()
            if rng.random() < 0.5 and any(self._address_of(peer) in known for peer in self.running()):
                return self._start(directory)
        else:
            directory = self._directory / f"peer{len({peer.directory for peer in self._peers})}"
        return self._start(directory, "--initial-peers", through)

    # Following peers.

    def _poll(self) -> None:
        for due, peer in list(self._resume):
            if time.monotonic() >= due:
                self._resume.remove((due, peer))
                peer.signal(signal.SIGCONT)
                peer.stopped = False
        for peer in self._peers:
            if not peer.over:
                self._follow(peer)

    def _follow(self, peer: ChaosPeer) -> None:
        peer.over = not peer.alive  # checked before reading, so that its last lines are not missed
        for event in peer.read():
            side = peer.side
            if side and event["peers"] > sum(other.side == side for other in self._peers):
                side = ""  # a group across the cut: formed just before it, or after it
                if not self._is_cut and peer.commits[event["round"]] > self._healed_at:
                    peer.side = ""
            self.reports.append(Report(peer.name, event["round"], event["digest"], side))
            if event.get("taken_back") is not None:
                self._problems.append(Problem("return", f"{peer.name} took back round {event['taken_back']}"))
        self._problems += [Problem("accusation", f"{peer.name}'s {text}") for text in peer.accusations]
        peer.accusations.clear()
        if peer.is_complete:
            self._processes.update(peer.processes())
        if peer.over and not peer.told_to_end:
            self._problems.append(
                Problem("crash", f"{peer.name} ended with code {peer.exit_code}: {peer.last_words()}")
            )
            self._record(f"crash-{peer.name}", [peer])
            if peer.is_complete:
                self._killed.add(peer.processes()[1].pid)
        if peer.over:
            self._gone.append(peer.directory)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, otherwise: str, poll_s: float = _POLL_S) -> None:
        """Follows all peers until a condition holds.

        Raises:
            HangError: the condition does not hold in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._poll()
            if condition():
                return
            if time.monotonic() > deadline:
                raise HangError(f"{otherwise} within {timeout_s:.0f} s")
            time.sleep(poll_s)

    def _together(self, after: int) -> int | None:
        """The first round after `after` that all running peers committed in one group."""
        running = self.running()
        common = set.intersection(*(set(peer.rounds) for peer in running)) if running else set()
        whole = (n for n in common if n > after and all(peer.rounds[n]["peers"] == len(running) for peer in running))
        return min(whole, default=None)

    def _await_together(self, after: int, timeout_s: float) -> int:
        self._wait(lambda: self._together(after) is not None, timeout_s, f"no round of all peers after {after}")
        number = self._together(after)
        assert number is not None
        return number

    def _calm_round(self, number: int) -> int:
        """Waits for a round of all peers after `number`, measures it if it is the next one, and returns it."""
        following = self._await_together(number, self._hang_s)
        commits = _timeline(self.running(), number, following)
        if len(commits) == 2 and commits[0].peers == commits[1].peers:
            self.pace.add(commits[1].peers, commits[1].at - commits[0].at)
        return following

    # Faults.

    def strike(self, fault: Fault) -> Outcome:
        """Injects one fault and waits until the swarm is whole again; problems are in the outcome."""
        outcome = Outcome(fault=fault, victims=[])
        self.outcomes.append(outcome)
        try:
            self._restore(fault.running)
            self._strike(fault, outcome)
            self._calm_round(outcome.commits[-1].round)
        except (HangError, LocalPeerError) as exc:
            self._heal()
            self._problems.append(Problem("hang", str(exc)))
            self._record(f"hang-{fault.number}", [peer for peer in self._peers if peer.alive])
            self._end_stuck()
            for peer in self._peers:
                peer.side = ""
        outcome.problems, self._problems = self._problems, []
        return outcome

    def _strike(self, fault: Fault, outcome: Outcome) -> None:
        rng = random.Random(fault.seed)
        old = self.running()
        newcomer = self._newcomer(fault.newcomer, rng) if fault.newcomer is not None else None
        self._await_phase(fault, old, newcomer)
        victims = self._do(fault, outcome, old, newcomer, rng)
        outcome.victims = [peer.name for peer in victims]
        survivors = [peer for peer in old if peer not in victims]

        def last_before() -> int:
            # Re-evaluated on each poll, as a commit may be reported seconds later.
            return max(peer.committed_before(outcome.at) for peer in survivors)

        self._wait(
            lambda: all(peer.over or peer.last_round > last_before() for peer in survivors),
            self._hang_s,
            "not all survivors committed another round",
        )
        self._await_fate(fault, outcome, victims)
        number = self._await_together(last_before(), self._hang_s)
        if fault.kind is Kind.CUT:  # that may be the round which was cut: since then the sides have continued apart
            self._await_together(max(peer.round for peer in self.running()), self._hang_s)
        for peer in self._peers:
            peer.side = ""
        outcome.round = last_before()
        outcome.commits = _timeline(survivors, outcome.round, number)
        outcome.together_s = outcome.commits[-1].at - outcome.at
        outcome.struck_in = phase_at(outcome.at, [attempt for peer in survivors for attempt in peer.attempts()])
        if newcomer is not None and (newcomer.synced_at is None or newcomer.synced_at >= outcome.at):
            outcome.struck_in = Phase.TRANSFER

    def _await_phase(self, fault: Fault, peers: list[ChaosPeer], newcomer: ChaosPeer | None) -> None:
        """Waits for the time of a fault."""
        if fault.phase is Phase.TRANSFER:
            assert newcomer is not None
            self._wait(
                lambda: newcomer.over or (newcomer.is_complete and _SYNCING in newcomer.process.text()),
                self._hang_s,
                "the newcomer did not begin to fetch the reference",
                _AIM_S,
            )
        elif fault.phase is Phase.EXCHANGE:
            self._wait(self._next_group(peers), self._hang_s, "no group", _AIM_S)
        elif fault.phase is Phase.RENDEZVOUS:
            # It lasts a tenth of a second, and begins about when all peers together have done their steps.
            committed = max((number for peer in peers for number in peer.commits), default=0)
            due = len(peers) * self._clock.inner_steps_after(committed) - 1
            self._wait(lambda: sum(peer.steps for peer in peers) < due / 2, self._hang_s, "no steps", _AIM_S)
            grouped = self._next_group(peers)
            self._wait(
                lambda: grouped() or sum(peer.steps for peer in peers) >= due, self._hang_s, "no rendezvous", _AIM_S
            )
        else:
            interval_s = self.pace.interval(len(peers))
            at = max(max(peer.commits.values(), default=0.0) for peer in peers) + fault.moment * interval_s
            while at < time.time():  # too late for this round: in the next one
                at += interval_s
            self._wait(lambda: time.time() >= at, self._hang_s, "no time for the fault", _AIM_S)

    @staticmethod
    def _next_group(peers: list[ChaosPeer]) -> Callable[[], bool]:
        """Returns a condition: a group has formed for a round that had none at the time of this call."""
        known = max((number for peer in peers for number in peer.groups), default=0)
        return lambda: any(max(peer.groups, default=0) > known for peer in peers)

    def _do(
        self, fault: Fault, outcome: Outcome, peers: list[ChaosPeer], newcomer: ChaosPeer | None, rng: random.Random
    ) -> list[ChaosPeer]:
        """Injects a fault and records when; returns the victims. For a cut these are the peers of the smaller side."""
        if fault.kind in STARTING:
            started = self._newcomer(fault.kind, rng)
            outcome.at = time.time()
            return [started]
        if fault.kind is Kind.CUT:
            outcome.at = time.time()
            return self._cut(fault, peers)
        match fault.role:
            case Role.NEWCOMER:
                assert newcomer is not None
                victim = newcomer
            case Role.LEADER:
                victim = self._leader(peers)
            case _:
                victim = rng.choice(peers)
        if not victim.is_complete:
            raise HangError(f"{victim.name} has lost a process already")
        main, network, daemon = victim.processes()
        victim.told_to_end = fault.kind in ENDING
        victim.stopped = fault.kind is Kind.STOP
        if fault.kind in ENDING - {Kind.LEAVE}:
            self._killed.add(network.pid)
        outcome.at = time.time()
        match fault.kind:
            case Kind.KILL:
                main.kill()
            case Kind.KILL_NETWORK:
                network.kill()
            case Kind.KILL_DAEMON:
                daemon.kill()
            case Kind.LEAVE:
                main.send_signal(signal.SIGTERM)
            case _:
                victim.signal(signal.SIGSTOP)
                self._resume.append((time.monotonic() + fault.seconds, victim))
        return [victim]

    @staticmethod
    def _leader(peers: list[ChaosPeer]) -> ChaosPeer:
        """The leader of the next rendezvous, if all peers come."""
        number = 1 + max(peer.round for peer in peers)
        return min(peers, key=lambda peer: rank(peer.run_id, number, peer.peer_id))

    def _await_fate(self, fault: Fault, outcome: Outcome, victims: list[ChaosPeer]) -> None:
        """Waits until the effect of a fault on its victims is over."""
        if fault.kind is Kind.STOP:
            self._wait(lambda: not self._resume, fault.seconds + 1.0, "no SIGCONT")
        elif fault.kind is Kind.CUT:
            over = outcome.at + fault.seconds
            self._wait(lambda: time.time() >= over, fault.seconds + 1.0, "no end of the cut")
            self._heal()
        elif fault.kind in ENDING:
            (victim,) = victims
            with suppress(HangError):
                self._wait(lambda: victim.over, _END_S, "")
            outcome.exit_code, outcome.last_words = victim.exit_code, victim.last_words()
            self._check_end(fault.kind, victim)

    def _check_end(self, kind: Kind, victim: ChaosPeer) -> None:
        """Records a problem with the end of a victim; kills it if it still runs."""
        code, words = victim.exit_code, victim.last_words()
        if code is None:
            self._problems.append(Problem("end", f"{victim.name} did not end within {_END_S:.0f} s of {kind}"))
            self._record(f"end-{victim.name}", [victim])
            self._end_at_once(victim)
        elif kind is Kind.LEAVE and code != 0:
            self._problems.append(Problem("end", f"{victim.name} left with code {code}: {words}"))
        elif kind in (Kind.KILL_NETWORK, Kind.KILL_DAEMON) and (code <= 0 or not words.startswith("join: ")):
            self._problems.append(Problem("end", f"{victim.name} ended after {kind} with code {code}: {words!r}"))

    def _end_at_once(self, peer: ChaosPeer) -> None:
        peer.told_to_end = True
        if peer.is_complete:
            self._killed.add(peer.processes()[1].pid)
        peer.signal(signal.SIGKILL)
        peer.process.process.wait(10)
        self._follow(peer)

    # Cuts.

    def _cut(self, fault: Fault, peers: list[ChaosPeer]) -> list[ChaosPeer]:
        assert self._network is not None
        names = split_in_two([peer.name for peer in peers], fault.seed)
        sides = [[peer for peer in peers if peer.name in side] for side in names]
        for label, side in zip("ab", sides, strict=True):
            for peer in side:
                peer.side = f"{fault.number}{label}"
        self._is_cut = True
        self._network.cut(*([peer.host for peer in side if peer.host is not None] for side in sides))
        return sides[1]

    def _heal(self) -> None:
        if self._network is not None and self._is_cut:
            self._network.heal()
            self._is_cut, self._healed_at = False, time.time()

    # Problems.

    def _restore(self, num_peers: int) -> None:
        """Brings the swarm back to the number of peers in the schedule, after a crash or a hang."""
        for _ in range(num_peers - len(self.running())):
            self._newcomer(Kind.RETURN, random.Random(0))
            self._await_together(max(peer.last_round for peer in self.running()), self._hang_s)

    def _end_stuck(self) -> None:
        """Kills the peers that are not in step with most others, so that the experiment can continue."""
        for _, peer in self._resume:
            peer.signal(signal.SIGCONT)
            peer.stopped = False
        self._resume.clear()
        running = self.running()
        in_step = max((_in_step_with(peer, running) for peer in running), key=len, default=[])
        for peer in running:
            if peer not in in_step:
                self._end_at_once(peer)

    def _record(self, name: str, peers: list[ChaosPeer]) -> None:
        """Writes the state of peers at the time of a problem to a file."""
        text = "\n\n".join([f"{time.time():.3f}", *(peer.state() for peer in peers)])
        (self._directory / f"{name}.txt").write_text(text, encoding="utf-8")

    # The end.

    def end(self) -> Totals:
        """Ends all peers with SIGTERM; returns the result of the experiment."""
        leaving = self.running()
        for peer in leaving:
            peer.told_to_end = True
            peer.process.process.send_signal(signal.SIGTERM)
        with suppress(HangError):
            self._wait(lambda: all(peer.over for peer in leaving), 2 * _END_S, "")
        for peer in leaving:
            self._check_end(Kind.LEAVE, peer)
        _, remaining = psutil.wait_procs(list(self._processes), timeout=10)
        for orphan in filter(_runs, remaining):
            self._problems.append(Problem("orphan", f"process {orphan.pid} of a peer that has ended"))
            orphan.kill()
        sockets = [path for path in self._temporary.glob("spes_swarm-*") if not self._is_excused(path)]
        self._problems += [Problem("socket", f"{path.name} is left over") for path in sockets]
        if self.outcomes:
            self.outcomes[-1].problems += self._problems
        return totals(self.outcomes, self.reports, self.pace)

    def _is_excused(self, sockets: Path) -> bool:
        """Returns True if they belong to a peer killed after the last start: the next start would remove them."""
        return int(sockets.name.split("-")[1]) in self._killed


def _in_step_with(one: ChaosPeer, peers: list[ChaosPeer]) -> list[ChaosPeer]:
    """Peers whose last round is within one of that of `one`; it is among them unless it has committed none."""
    return [peer for peer in peers if peer.rounds and abs(peer.last_round - one.last_round) <= 1]


def _runs(process: psutil.Process) -> bool:
    """Returns True if a process runs; a zombie has ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _timeline(peers: list[ChaosPeer], first: int, last: int) -> list[Commit]:
    """The rounds from `first` to `last`, each with the time of its first commit among these peers."""
    commits = []
    for number in range(first, last + 1):
        known = [peer for peer in peers if number in peer.commits]
        if known:
            earliest = min(known, key=lambda peer: peer.commits[number])
            commits.append(Commit(number, earliest.commits[number], earliest.rounds[number]["peers"]))
    return commits
