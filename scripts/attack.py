"""Measures the cost of attackers for four honest peers: eval loss, pace, recovery, and which peers are named.

    .venv/bin/python scripts/attack.py --rounds 20 --seeds 3 --kinds loud ghosts

A fifth member contributes noise from the first round on (see tests/helpers/noise_peer.py), or claims all experts
(`claimant`, otherwise honest); `fifth` is honest, and shows the cost of a fifth process on the same cores. Strangers
that never take part (`clock`, `ghosts`; see tests/helpers/strangers.py) come after the first commit of all four;
intruders, which only submit statements (`silent`, `absent`, `lying`, `owing`; see tests/helpers/intruder.py), before
it. The
attacker is killed after round --rounds, and the honest peers train for two more rounds. The baseline of each seed is a
run without an attacker. All peers are real processes on this machine. Prints a line for each run and the means over
the seeds, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from scripts.testing.chaos.peer import accuses
from scripts.testing.local_peer import LocalPeer
from spes_swarm.config.file import load_config, paper_config_path
from spes_swarm.protocol.members.identity import Identity

ROOT = Path(__file__).parent.parent
NUM_HONEST = 4
RECOVERY_ROUNDS = 2
LOOPBACK = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
NOISE = ("loud", "measured", "understated", "reducer")
STRANGERS = ("clock", "ghosts")
INTRUDERS = ("silent", "absent", "lying", "owing")
EXPERTS = {"claimant": "0,1,2,3,4,5,6,7", "fifth": "auto"}
KINDS = (*NOISE, *EXPERTS, *STRANGERS, *INTRUDERS)
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    kind: str
    seed: int
    losses: tuple[float, float]  # eval loss in the last round of the attack, and RECOVERY_ROUNDS later
    seconds_per_round: float  # median
    group_seconds: float  # of these, until the group was complete; median
    steps: float  # of an honest peer until the end of the attack, on average
    named_by: dict[str, int]  # `fault` events of honest peers about the attacker, by kind
    accused: dict[str, int]  # the same about honest peers, as liars or laggards
    parts_missing: int


def run_swarm(directory: Path, config: Path, kind: str, options: argparse.Namespace, seed: int) -> Outcome:
    """Runs four honest peers, and an attacker unless `kind` is "none"."""
    is_member = kind in (*NOISE, *EXPERTS)
    common = [*LOOPBACK, "--wait-for-peers", str(NUM_HONEST + is_member)]
    last = options.rounds + RECOVERY_ROUNDS
    with ExitStack() as stack:
        peers: list[LocalPeer] = []
        for i in range(NUM_HONEST):
            where = ["--initial-peers", peers[0].address()] if peers else ["--config", str(config)]
            arguments = [*common, *where, "--seed", str(NUM_HONEST * seed + i)]
            peers.append(stack.enter_context(LocalPeer(directory / str(i), arguments)))
        attacker, process = "", None
        if kind != "none":
            hostile = directory / "attacker"
            hostile.mkdir()
            attacker = Identity.load_or_create(hostile / "identity.key").peer_id
            if kind in STRANGERS:
                for peer in peers:
                    peer.wait_for("round", lambda event: event["peers"] == NUM_HONEST)
            process = start_attacker(hostile, kind, [peer.address() for peer in peers], options.size)
            stack.callback(process.kill)
        begun = 1
        if kind in STRANGERS:
            while not (directory / "attacker" / "console.log").stat().st_size:
                begun = peers[0].wait_for_round(begun + 1, PATIENCE_S)["round"]
        for number in range(1, last + 1):
            peers[0].wait_for_round(number, PATIENCE_S)
            if process is not None and number == options.rounds:
                if process.poll() is not None:
                    raise SystemExit((directory / "attacker" / "console.log").read_text())
                process.kill()
                process.wait()
        events = [peers[0].rounds()[number] for number in range(1, last + 1) if number in peers[0].rounds()]
        honest = {peer.events("join")[0]["peer_id"] for peer in peers}
        named: dict[str, int] = {}
        accused: dict[str, int] = {}
        for peer in peers:
            for fault in peer.events("fault"):
                if fault["peer"] == attacker:
                    named[fault["kind"]] = named.get(fault["kind"], 0) + 1
                elif fault["peer"] in honest and accuses(fault):
                    accused[fault["kind"]] = accused.get(fault["kind"], 0) + 1
        # Rounds before the strangers came are not affected by them.
        counted = [event for event in events if begun < event["round"] <= options.rounds]
        times = [event["time"] for event in counted]
        return Outcome(
            kind=kind,
            seed=seed,
            losses=(peers[0].rounds()[options.rounds]["eval_loss"], peers[0].rounds()[last]["eval_loss"]),
            seconds_per_round=statistics.median(b - a for a, b in pairwise(times)),
            group_seconds=statistics.median(event["group_seconds"] for event in counted),
            steps=sum(e["round"] < options.rounds for peer in peers for e in peer.events("step")) / NUM_HONEST,
            named_by=named,
            accused=accused,
            parts_missing=sum(event["parts_missing"] for event in events),
        )


def start_attacker(directory: Path, kind: str, addresses: list[str], size: float) -> subprocess.Popen[bytes]:
    """Starts the attacking process."""
    module = [sys.executable, "-m"]
    if kind in NOISE:
        command = [
            *module,
            "tests.helpers.noise_peer",
            addresses[0],
            str(directory),
            "--kind",
            kind,
            "--size",
            str(size),
        ]
    elif kind in STRANGERS:
        command = [*module, "tests.helpers.strangers", *addresses, "--kind", kind]
    elif kind in INTRUDERS:
        command = [*module, "tests.helpers.intruder", *addresses, "--directory", str(directory), "--kind", kind]
    else:
        joining = ["--initial-peers", addresses[0], "--experts", EXPERTS[kind], "--output-dir", str(directory)]
        command = [*module, "spes_swarm.join", *LOOPBACK, *joining]
    with (directory / "console.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def main() -> int:
    """Runs the attacks."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=paper_config_path())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", type=float, default=3.0, help="length of the noise relative to the last round's move")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data; all start from the same weights")
    parser.add_argument("--sequences", type=int, default=128, help="held-out sequences of an evaluation")
    parser.add_argument("--clip", type=float, help="override the configuration's; 0 = no bounds")
    parser.add_argument("--experts-per-peer", type=int, help="override the configuration's")
    parser.add_argument("--json", type=Path, default=Path("runs/attack.json"))
    options = parser.parse_args()
    configured = load_config(options.config).run
    if configured is None:
        parser.error(f"{options.config} has no `run:` section")
    run = configured.to_dict()
    run["evaluation"]["sequences"] = options.sequences
    run["evaluation"]["every_rounds"] = 1
    if options.clip is not None:
        run["round"]["clip"] = options.clip
    run["experts_per_peer"] = options.experts_per_peer or run["experts_per_peer"]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        config = Path(name) / "run.yaml"
        config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
        for seed in range(options.seeds):
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
    return (
        f"seed {outcome.seed}, {outcome.kind}: eval loss {loss:.3f} ({change:+.1%}), two rounds after the "
        f"attack {recovered:.3f} ({after:+.1%}), {outcome.seconds_per_round:.1f} s a round ({pace:.2f} x), "
        f"of these {outcome.group_seconds:.1f} s in the rendezvous, "
        f"{outcome.steps:.0f} steps a peer, named {outcome.named_by or 'never'}, honest peers accused "
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

    pace = statistics.fmean(outcome.seconds_per_round for outcome in of("none"))
    lines = [
        f"| {kind} | {spread([o.losses[0] for o in of(kind)], '.3f')} | {mean(kind, 0) / mean('none', 0) - 1:+.1%} "
        f"| {mean(kind, 1) / mean('none', 1) - 1:+.1%} | "
        f"{spread([o.seconds_per_round / pace for o in of(kind)], '.2f')} | "
        f"{statistics.fmean(o.steps for o in of(kind)):.0f} |"
        for kind in dict.fromkeys(outcome.kind for outcome in outcomes)
    ]
    head = "| attack | eval loss | change from the honest mean | two rounds after | pace | steps a peer |"
    return "\n".join(["", head, "|" + "---|" * 6, *lines])


if __name__ == "__main__":
    sys.exit(main())
