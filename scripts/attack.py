"""Measures the cost of attackers for honest peers: eval loss, pace, recovery, and which peers are named.

    .venv/bin/python scripts/attack.py --rounds 20 --seeds 3 --kinds loud ghosts
    .venv/bin/python scripts/attack.py --rounds 24 --honest 6 --hostile 2 --kinds slow late-leader
    .venv/bin/python scripts/attack.py --tiny --rounds 200 --seeds 20 --kinds

Besides --honest peers, --hostile attackers of one kind run, each with an identity of its own. Members take part from
the first round on: they contribute noise (see tests/helpers/noise_peer.py), lie about the results that they reduce
(`flipped`, `two-faced`, `forged` and others; see tests/helpers/lying_reducer.py), about their own work or about the
others (`opposite`, `experts`, `verdicts`, `accusing` and others; see tests/helpers/lying_contributor.py), keep the
others waiting (`slow`, `slow-push`, `slow-pull`, `late-leader`; see tests/helpers/slow_peer.py), or claim all experts
(`claimant`, otherwise honest). Of `shielded` ones, the first shows its work to no auditor, which protects the others:
they flip the results that they reduce. `fifth` is honest, and shows the cost of another process on the same cores;
`slowly` is, too, and trains at a tenth of the speed. Strangers that never take part (`clock`, `ghosts`; see
tests/helpers/strangers.py) come after the first commit of all honest peers; intruders, which only submit statements
(`silent`, `absent`, `lying`, `owing`; see tests/helpers/intruder.py), before it. The attackers are killed after round
--rounds, and the honest peers train for two more rounds. The baseline of each seed is a run without attackers;
`--kinds` alone runs only those. All peers are real processes on this machine. Prints a line for each run and the means
over the seeds, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from scripts.testing.chaos.peer import accuses
from scripts.testing.local_peer import Event, LocalPeer
from scripts.testing.paper_config import paper_config_path
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.protocol.members.identity import Identity
from tests.helpers.lying_contributor import ACCOMPLICES
from tests.helpers.lying_contributor import KINDS as LYING_CONTRIBUTORS
from tests.helpers.lying_reducer import KINDS as LYING_REDUCERS
from tests.helpers.swarm import TINY_RUN

ROOT = Path(__file__).parent.parent
RECOVERY_ROUNDS = 2
LOOPBACK = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
NOISE = ("loud", "measured", "understated", "reducer")
STRANGERS = ("clock", "ghosts")
SLOW = ("slow", "slow-push", "slow-pull", "late-leader")
INTRUDERS = ("silent", "absent", "lying", "owing")
LIARS = dict.fromkeys(LYING_REDUCERS, "lying_reducer") | dict.fromkeys(LYING_CONTRIBUTORS, "lying_contributor")
HELPERS = LIARS | {"slowly": "slow_join"}
EXPERTS = {"claimant": "0,1,2,3,4,5,6,7", "fifth": "auto"} | dict.fromkeys(HELPERS, "auto")
MEMBERS = (*NOISE, *SLOW, *EXPERTS, "shielded")
KINDS = (*MEMBERS, *STRANGERS, *INTRUDERS)
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    kind: str
    seed: int
    losses: tuple[float, float]  # eval loss in the last round of the attack, and RECOVERY_ROUNDS later
    seconds_per_round: float  # median: what a usual round takes
    mean_seconds_per_round: float  # which shows attacks that strike in some rounds only
    group_seconds: float  # of these, until the group was complete; median
    steps: float  # of an honest peer until the end of the attack, on average
    taken_back: int  # rounds that the honest peers have taken back
    named_by: dict[str, int]  # `fault` events of honest peers about the attackers, by kind
    accused: dict[str, int]  # the same about honest peers, as liars or without duty
    # For each attacker, by honest peer: the round that the peer had committed when it got a proof; None: it got none.
    proven_in: list[list[int | None]]
    last_shared: list[int]  # by honest peer: the last round with all members
    parts_missing: int


@dataclass(frozen=True)
class Attacker:
    """An attacking process."""

    directory: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, directory: Path, kind: str, addresses: list[str], size: float, identities: list[str]) -> Attacker:
        """Starts the process in a directory with its identity; `identities`: those of all attackers."""
        with (directory / "console.log").open("wb") as log:
            command = [sys.executable, "-m", *command_line(directory, kind, addresses, size, len(identities))]
            environment = os.environ | {ACCOMPLICES: " ".join(identities)}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        return cls(directory, process)

    def said(self) -> str:
        """What it has printed."""
        return (self.directory / "console.log").read_text()

    def kill(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def make_identity(directory: Path) -> str:
    """Makes the directory of an attacker, with an identity; returns its peer id."""
    directory.mkdir()
    return Identity.load_or_create(directory / "identity.key").peer_id


def command_line(directory: Path, kind: str, addresses: list[str], size: float, hostile: int) -> list[str]:
    """The module of an attacker, one of `hostile`, with its arguments."""
    if kind in NOISE:
        return ["tests.helpers.noise_peer", addresses[0], str(directory), "--kind", kind, "--size", str(size)]
    if kind in SLOW:
        return ["tests.helpers.slow_peer", addresses[0], str(directory), "--kind", kind]
    if kind in STRANGERS:
        return ["tests.helpers.strangers", *addresses, "--kind", kind]
    if kind in INTRUDERS:
        return ["tests.helpers.intruder", *addresses, "--directory", str(directory), "--kind", kind]
    joining = ["--initial-peers", addresses[0], "--experts", EXPERTS[kind], "--output-dir", str(directory)]
    # Several would begin without the others, while these wait for all.
    joining += ["--wait-for-peers", str(len(addresses) + hostile)]
    module = [f"tests.helpers.{HELPERS[kind]}", kind] if kind in HELPERS else ["spes_swarm.join"]
    return [*module, *LOOPBACK, *joining]


def run_swarm(directory: Path, config: Path, kind: str, options: argparse.Namespace, seed: int) -> Outcome:
    """Runs the honest peers, and the attackers unless `kind` is "none"."""
    num_members = options.honest + (options.hostile if kind in MEMBERS else 0)
    common = [*LOOPBACK, "--wait-for-peers", str(num_members)]
    last = options.rounds + RECOVERY_ROUNDS
    with ExitStack() as stack:
        peers: list[LocalPeer] = []
        for i in range(options.honest):
            where = ["--initial-peers", peers[0].address()] if peers else ["--config", str(config)]
            arguments = [*common, *where, "--seed", str(options.honest * seed + i)]
            peers.append(stack.enter_context(LocalPeer(directory / str(i), arguments)))
        addresses = [peer.address() for peer in peers]
        if kind in STRANGERS:
            for peer in peers:
                peer.wait_for("round", lambda event: event["peers"] == options.honest)
        hostile = [directory / f"attacker-{i}" for i in range(options.hostile if kind != "none" else 0)]
        identities = [make_identity(each) for each in hostile]
        attackers: list[Attacker] = []
        for i, each in enumerate(hostile):
            role = ("flipped" if i else "accomplice") if kind == "shielded" else kind
            attackers.append(Attacker.start(each, role, addresses, options.size, identities))
            stack.callback(attackers[-1].kill)
        begun = 1
        if kind in STRANGERS:
            while not all(attacker.said() for attacker in attackers):
                begun = peers[0].wait_for_round(begun + 1, PATIENCE_S)["round"]
        for number in range(1, options.rounds + 1):
            peers[0].wait_for_round(number, PATIENCE_S)
        for attacker in attackers:
            if attacker.process.poll() is not None and "is excluded" not in attacker.said():
                raise SystemExit(attacker.said())
            attacker.kill()
        peers[0].wait_for_round(last, PATIENCE_S)
        return measure(peers, identities, kind, seed, begun, options.rounds)


def measure(peers: list[LocalPeer], hostile: list[str], kind: str, seed: int, begun: int, rounds: int) -> Outcome:
    """Reads the outcome from what honest peers have written; `begun`: the round in which the attack began."""
    honest = {peer.events("join")[0]["peer_id"] for peer in peers}
    faults = [fault for peer in peers for fault in peer.events("fault")]
    committed = [event for event in peers[0].rounds().values() if event["round"] <= rounds + RECOVERY_ROUNDS]
    # Rounds before the strangers came are not affected by them.
    counted = [event for event in committed if begun < event["round"] <= rounds]
    pauses = [after["time"] - before["time"] for before, after in pairwise(counted)]

    def loss(number: int) -> float:
        """The eval loss after a round, or after the one before if the peer has missed it."""
        return float([event for event in committed if event["round"] <= number][-1]["eval_loss"])

    return Outcome(
        kind=kind,
        seed=seed,
        losses=(loss(rounds), loss(rounds + RECOVERY_ROUNDS)),
        seconds_per_round=statistics.median(pauses),
        mean_seconds_per_round=sum(pauses) / (counted[-1]["round"] - counted[0]["round"]),
        group_seconds=statistics.median(event["group_seconds"] for event in counted),
        steps=sum(e["round"] < rounds for peer in peers for e in peer.events("step")) / len(peers),
        taken_back=sum(event.get("taken_back") is not None for event in committed),
        named_by=by_kind(fault for fault in faults if fault["peer"] in hostile),
        accused=by_kind(fault for fault in faults if fault["peer"] in honest and accuses(fault)),
        parts_missing=sum(event["parts_missing"] for event in committed),
        proven_in=[[proven_in(peer, attacker) for peer in peers] for attacker in hostile],
        last_shared=[
            max([0, *(n for n, event in peer.rounds().items() if event["peers"] == len(peers) + len(hostile))])
            for peer in peers
            if kind in MEMBERS
        ],
    )


def proven_in(peer: LocalPeer, attacker: str) -> int | None:
    """The round that a peer had committed when it got a proof against an attacker; None if it got none."""
    number = 0
    for event in peer.events():
        if event["event"] == "round":
            number = event["round"]
        elif event["event"] == "fault" and (event["kind"], event["peer"]) == ("proven", attacker):
            return number
    return None


def by_kind(faults: Iterable[Event]) -> dict[str, int]:
    """The number of faults of each kind."""
    return dict(Counter(fault["kind"] for fault in faults))


def main() -> int:
    """Runs the attacks."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=paper_config_path())
    parser.add_argument("--tiny", action="store_true", help="the smallest model instead, for many rounds or peers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--honest", type=int, default=4, help="honest peers")
    parser.add_argument("--hostile", type=int, default=1, help="attackers of a kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[kind for kind in KINDS if kind != "shielded"])
    parser.add_argument("--size", type=float, default=3.0, help="length of the noise relative to the last round's move")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data; all start from the same weights")
    parser.add_argument("--first-seed", type=int, default=0, help="to go on where an earlier run ended")
    parser.add_argument("--sequences", type=int, default=128, help="held-out sequences of an evaluation")
    parser.add_argument("--clip", type=float, help="override the configuration's; 0 = no bounds")
    parser.add_argument("--experts-per-peer", type=int, help="override the configuration's")
    parser.add_argument("--inner-steps", type=int, help="override the configuration's")
    parser.add_argument("--json", type=Path, default=Path("runs/attack.json"))
    options = parser.parse_args()
    configured = RunConfig.from_dict(TINY_RUN, "--tiny") if options.tiny else load_config(options.config).run
    if "shielded" in options.kinds and options.hostile < 2:
        parser.error("shielded: it takes --hostile 2 or more")
    if configured is None:
        parser.error(f"{options.config} has no `run:` section")
    run = configured.to_dict()
    run["evaluation"]["sequences"] = options.sequences
    run["evaluation"]["every_rounds"] = 1
    if options.clip is not None:
        run["round"]["clip"] = options.clip
    run["experts_per_peer"] = options.experts_per_peer or run["experts_per_peer"]
    run["round"]["inner_steps"] = options.inner_steps or run["round"]["inner_steps"]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        config = Path(name) / "run.yaml"
        config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            honest: Outcome | None = None
            for kind in ["none", *options.kinds]:
                outcome = run_swarm(Path(name) / f"{kind}-{seed}", config, kind, options, seed)
                honest = honest or outcome
                outcomes.append(outcome)
                print(describe(outcome, honest), flush=True)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                content = {"run": run, "outcomes": [asdict(o) for o in outcomes]}
                options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(table(outcomes))
    return 0


def describe(outcome: Outcome, honest: Outcome) -> str:
    """One line about a run, compared with the honest one."""
    loss, recovered = outcome.losses
    change, after = (loss / base - 1 for loss, base in zip(outcome.losses, honest.losses, strict=True))
    pace = outcome.seconds_per_round / honest.seconds_per_round
    mean_pace = outcome.mean_seconds_per_round / honest.mean_seconds_per_round
    return (
        f"seed {outcome.seed}, {outcome.kind}: eval loss {loss:.3f} ({change:+.1%}), two rounds after the "
        f"attack {recovered:.3f} ({after:+.1%}), {outcome.mean_seconds_per_round:.1f} s a round ({mean_pace:.2f} x), "
        f"in the median {outcome.seconds_per_round:.1f} s ({pace:.2f} x), "
        f"of these {outcome.group_seconds:.1f} s in the rendezvous, "
        f"{outcome.steps:.0f} steps a peer, {outcome.taken_back} rounds taken back, "
        f"named {outcome.named_by or 'never'}, proven in rounds {outcome.proven_in}, last rounds with all members "
        f"{outcome.last_shared}, honest peers accused "
        f"{outcome.accused or 'never'}, parts missing {outcome.parts_missing}"
    )


def table(outcomes: list[Outcome]) -> str:
    """A table of means over the seeds, with minimum and maximum."""

    def spread(values: list[float], form: str) -> str:
        return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    def of(kind: str) -> list[Outcome]:
        return [outcome for outcome in outcomes if outcome.kind == kind]

    def mean(kind: str, which: int) -> float:
        return statistics.fmean(outcome.losses[which] for outcome in of(kind))

    median_s = statistics.fmean(outcome.seconds_per_round for outcome in of("none"))
    mean_s = statistics.fmean(outcome.mean_seconds_per_round for outcome in of("none"))
    lines = [
        f"| {kind} | {spread([o.losses[0] for o in of(kind)], '.3f')} | {mean(kind, 0) / mean('none', 0) - 1:+.1%} "
        f"| {mean(kind, 1) / mean('none', 1) - 1:+.1%} | "
        f"{spread([o.seconds_per_round / median_s for o in of(kind)], '.2f')} | "
        f"{spread([o.mean_seconds_per_round / mean_s for o in of(kind)], '.2f')} | "
        f"{statistics.fmean(o.steps for o in of(kind)):.0f} |"
        for kind in dict.fromkeys(outcome.kind for outcome in outcomes)
    ]
    loss = "eval loss | change from the honest mean | two rounds after"
    head = f"| attack | {loss} | median pace | mean pace | steps a peer |"
    return "\n".join(["", head, "|" + "---|" * 7, *lines])


if __name__ == "__main__":
    sys.exit(main())
