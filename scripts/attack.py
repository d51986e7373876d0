"""What one member that contributes noise costs the others: eval loss, pace, recovery, and whether it is named.

    .venv/bin/python scripts/attack.py --rounds 20 --kinds loud measured

For each kind of attack (see tests/noise_peer.py) four honest peers train with the attacker as a fifth member from the
first round on; it is killed after round --rounds, and the honest ones go on for two rounds more. One run without an
attacker is the measure. All peers are real processes on this machine. Prints a table and writes JSON.
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
from typing import Any

import yaml

from spes_swarm.identity import Identity
from spes_swarm.local_peer import LocalPeer

ROOT = Path(__file__).parent.parent
NUM_HONEST = 4
RECOVERY_ROUNDS = 2
LOOPBACK = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
KINDS = ("loud", "measured", "understated", "reducer")
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    kind: str
    seed: int
    eval_losses: dict[int, float]  # by round
    seconds_per_round: float  # median
    rounds_attacked: int  # of those counted, how many had the attacker as a member
    named_by: dict[str, int]  # honest peers' `fault` events about the attacker, by kind
    accused: dict[str, int]  # and about honest peers, other than lost connections
    parts_missing: int


def run_swarm(directory: Path, config: Path, kind: str, options: argparse.Namespace, seed: int) -> Outcome:
    """Four honest peers, and an attacker unless `kind` is "none"."""
    common = [*LOOPBACK, "--wait-for-peers", str(NUM_HONEST + (kind != "none"))]
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
            command = [sys.executable, "-m", "tests.noise_peer", peers[0].address(), str(hostile), "--kind", kind]
            with (hostile / "console.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--size", str(options.size)], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
                )
            stack.callback(process.kill)
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
                elif fault["peer"] in honest:
                    accused[fault["kind"]] = accused.get(fault["kind"], 0) + 1
        counted = [event for event in events if 2 <= event["round"] <= options.rounds]
        times = [event["time"] for event in counted]
        return Outcome(
            kind=kind,
            seed=seed,
            eval_losses={event["round"]: event["eval_loss"] for event in events if event["eval_loss"] is not None},
            seconds_per_round=statistics.median(b - a for a, b in pairwise(times)),
            rounds_attacked=sum(event["peers"] > NUM_HONEST for event in counted),
            named_by=named,
            accused=accused,
            parts_missing=sum(event["parts_missing"] for event in events),
        )


def main() -> int:
    """Runs the attacks."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--size", type=float, default=3.0, help="length of the noise over that of the last round's move"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=128, help="held-out sequences of an evaluation")
    parser.add_argument("--clip", type=float, help="override the configuration's; 0 = no bounds")
    parser.add_argument("--experts-per-peer", type=int, help="override the configuration's")
    parser.add_argument("--json", type=Path, default=Path("runs/attack.json"))
    options = parser.parse_args()
    run: dict[str, Any] = yaml.safe_load(options.config.read_text(encoding="utf-8"))["run"]
    run["evaluation"]["sequences"] = options.sequences
    run["evaluation"]["every_rounds"] = 1
    if options.clip is not None:
        run["round"]["clip"] = options.clip
    run["experts_per_peer"] = options.experts_per_peer or run["experts_per_peer"]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        for seed in range(options.seeds):
            config = Path(name) / f"{seed}.yaml"
            config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
            honest: Outcome | None = None
            for kind in ["none", *options.kinds]:
                outcome = run_swarm(Path(name) / f"{kind}-{seed}", config, kind, options, seed)
                honest = honest or outcome
                outcomes.append(outcome)
                print(describe(outcome, honest, options.rounds), flush=True)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                content = {"run": run, "outcomes": [asdict(o) for o in outcomes]}
                options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def describe(outcome: Outcome, honest: Outcome, rounds: int) -> str:
    """One line."""
    loss, recovered = (outcome.eval_losses[number] for number in (rounds, rounds + RECOVERY_ROUNDS))
    change = loss / honest.eval_losses[rounds] - 1
    after = recovered / honest.eval_losses[rounds + RECOVERY_ROUNDS] - 1
    pace = outcome.seconds_per_round / honest.seconds_per_round
    return (
        f"seed {outcome.seed}, {outcome.kind}: eval loss {loss:.3f} ({change:+.1%}), two rounds after the attack "
        f"{recovered:.3f} ({after:+.1%}), {outcome.seconds_per_round:.1f} s a round ({pace:.2f} x), attacked in "
        f"{outcome.rounds_attacked} rounds, named {outcome.named_by or 'never'}, honest peers accused "
        f"{outcome.accused or 'never'}, parts missing {outcome.parts_missing}"
    )


if __name__ == "__main__":
    sys.exit(main())
