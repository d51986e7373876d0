"""Three volunteers train on the standard library's source; one is killed, another one joins; the model is exported.

Every peer is an ordinary `python -m spes_swarm.join` on this machine; the demo uses only what any user can use. Run it
with `bash scripts/demo.sh`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.testing.interrupts import report_interrupt

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
report_interrupt("demo")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.testing.entropy import unigram_entropy
from scripts.testing.local_peer import LocalPeer
from scripts.testing.output_directory import remake_directory
from spes_swarm.base.errors import UserError
from spes_swarm.base.wording import loss_with_error, plural
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.peer.panel import experts_text

PROMPT = "def main():\n    "
console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Prints a headline."""
    console.print(f"\n[bold]{text}[/bold]")


def show_round(peers: dict[str, LocalPeer], number: int) -> None:
    """Prints a line about a round, with the digests of all live peers."""
    events = {name: peer.rounds()[number] for name, peer in peers.items() if number in peer.rounds()}
    if not events:
        return
    digests = {event["digest"] for event in events.values()}
    first = next(iter(events.values()))
    agree = "all agree on" if len(digests) == 1 else f"{len(digests)} DIFFERENT digests, such as"
    loss = loss_with_error(first["eval_loss"], first["eval_loss_stderr"])
    evaluated = f"eval loss {loss}, " if first["eval_loss"] else ""
    console.print(
        f"  round {number:3}: {evaluated}{plural(first['peers'], 'peer')}, "
        f"{first['experts_covered']} experts covered, {agree} {first['digest'][:12]}"
    )


def follow(peers: dict[str, LocalPeer], start: int, stop: int, timeout_s: float) -> int:
    """Shows every fifth round until all peers have committed `stop`; returns the last one."""
    for number in range(start, stop + 1):
        for peer in peers.values():
            peer.wait_for_round(number, timeout_s)
        if number % 5 == 0 or number == stop:
            show_round(peers, number)
    return max(min(max(peer.rounds()) for peer in peers.values()), stop)


def common_digests(peers: list[LocalPeer]) -> tuple[int, int]:
    """(number of rounds that at least two peers committed, number of those with equal digests)."""
    seen: dict[int, set[str]] = {}
    counts: dict[int, int] = {}
    for peer in peers:
        for number, event in peer.rounds().items():
            seen.setdefault(number, set()).add(event["digest"])
            counts[number] = counts.get(number, 0) + 1
    shared = [number for number, count in counts.items() if count > 1]
    return len(shared), sum(len(seen[number]) == 1 for number in shared)


@contextmanager
def monitor(directory: Path, address: str) -> Iterator[str]:
    """Runs a monitor, as any user would; yields the URL of its page."""
    command = [sys.executable, "-m", "spes_swarm.monitor", "--initial-peers", address, "--web", "127.0.0.1:0"]
    log = directory / "monitor.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--history", str(directory / "history.sqlite")], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while not (pages := [word for word in log.read_text(errors="replace").split() if word.startswith("http://")]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the monitor did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
        yield pages[0]
    finally:
        process.terminate()
        process.wait(30)


def watched(page: str, round_number: int) -> dict[str, Any]:
    """The monitor's state, once it shows this round, which may take some seconds; its last one if it does not."""
    until = time.monotonic() + 30.0
    while True:
        with urllib.request.urlopen(f"{page}api/state", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
        if state["round"] >= round_number or time.monotonic() > until:
            return state
        time.sleep(0.2)


def generate(directory: Path) -> str:
    """Draws a sample from the exported model with plain transformers."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    length = model.config.max_position_embeddings - ids.shape[1]
    with torch.no_grad():
        sample = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True, temperature=0.7, top_k=40
        )
    return str(tokenizer.decode(sample[0], skip_special_tokens=True))


def main() -> int:
    """Runs the demo; exit code 0 only if all of its checks pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="output directory; an earlier demo in it is removed (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=120, help="total number of rounds (at least 30)")
    options = parser.parse_args()
    rounds = max(30, options.rounds)
    output: Path = options.output
    try:
        remake_directory(output, "demo")
    except UserError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 2
    started = time.monotonic()
    tokenizer = load_tokenizer("bytes")
    tokens = np.concatenate([file.tokens for file in open_corpus("stdlib", tokenizer)])
    entropy = unigram_entropy(tokens)
    say(f"The text: {len(tokens):,} bytes of Python's standard library; unigram entropy {entropy:.3f} nats per byte")
    common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1", "--wait-for-peers"]
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> LocalPeer:
            return stack.enter_context(LocalPeer(output / name, [*common, *arguments, "--name", name]))

        say("Ada founds a run; Ben and Cleo join with the command that Ada's peer prints")
        ada = start("ada", "3")
        address = ada.address()
        console.print(f"  python -m spes_swarm.join --initial-peers {address}", soft_wrap=True)
        ben = start("ben", "3", "--initial-peers", address)
        cleo = start("cleo", "3", "--initial-peers", address)
        peers = {"ada": ada, "ben": ben, "cleo": cleo}
        for name, peer in peers.items():
            joined = peer.wait_for("join", timeout_s=120)
            console.print(f"  {name} trains experts {experts_text(tuple(joined['experts']))}")
        page = stack.enter_context(monitor(output, address))
        console.print(f"  anyone can watch: {page} (a monitor that only reads the DHT)", soft_wrap=True)
        last = follow(peers, 1, rounds // 3, 120)

        say(f"Cleo's process is killed (SIGKILL) after round {last}")
        cleo.kill()
        peers = {"ada": ada, "ben": ben}
        before_kill = last
        last = follow(peers, last + 1, last + 5, 120)

        say("Dora joins late: she fetches the reference from the others and trains from her next round on")
        dora = start("dora", "1", "--initial-peers", address)
        sync = dora.wait_for("sync", timeout_s=120)
        joined = dora.wait_for("join", timeout_s=120)
        console.print(
            f"  {sync['payload_bytes'] / 1e6:.1f} MB from {plural(len(sync['donors']), 'donor')} in "
            f"{sync['seconds']:.2f} s, every chunk verified; "
            f"she trains experts {experts_text(tuple(joined['experts']))}"
        )
        first = dora.wait_for("round", timeout_s=120)["round"]
        peers = {"ada": ada, "ben": ben, "dora": dora}
        last = follow(peers, first, max(rounds, first + 5), 300)

        seen = watched(page, last)
        say("All peers leave (SIGTERM); Ada's checkpoint is exported")
        for peer in peers.values():
            peer.process.send_signal(signal.SIGTERM)
        codes = [peer.process.wait(60) for peer in peers.values()]
        everyone = [ada, ben, cleo, dora]
        final = [event for _, event in sorted(ada.rounds().items()) if event["eval_loss"] is not None][-1]
        shared, equal = common_digests(everyone)
    export = output / "model"
    subprocess.run([sys.executable, "-m", "spes_swarm.export", str(output / "ada"), str(export)], check=True)
    sample = generate(export)
    say("A sample from the export, loaded with AutoModelForCausalLM:")
    console.print("  " + sample.replace("\n", "\n  "), markup=False)

    start_loss = ada.rounds()[1]["eval_loss"]
    traffic = sum((e["payload_bytes_sent"] or 0) for peer in everyone for e in peer.rounds().values())
    table = Table(title="Summary", show_header=False)
    for label, value in (
        ("eval loss after round 1", f"{start_loss:.3f} nats per byte"),
        (
            f"eval loss after round {final['round']}",
            f"{final['eval_loss']:.3f} nats per byte (standard error {final['eval_loss_stderr']:.3f})",
        ),
        ("unigram entropy of the corpus", f"{entropy:.3f} nats per byte"),
        ("rounds compared between peers", str(shared)),
        ("of these with equal digests", str(equal)),
        ("rounds after the kill", str(max(ada.rounds()) - before_kill)),
        ("last state in the monitor", f"round {seen['round']}, {len(seen['peers'])} peers, {seen['status']}"),
        ("Dora's donors", str(len(sync["donors"]))),
        ("payload sent in total", f"{traffic / 1e6:.1f} MB"),
        ("exit codes of the peers that left", str(codes)),
        ("time", f"{time.monotonic() - started:.0f} s"),
    ):
        table.add_row(label, value)
    console.print()
    console.print(table)
    result = {"eval_loss": final["eval_loss"], "entropy": entropy, "rounds": shared, "equal_digests": equal}
    (output / "demo.json").write_text(json.dumps(result), encoding="utf-8")
    watching = seen["round"] >= last and {"ada", "ben", "dora"} <= {peer["name"] for peer in seen["peers"]}
    learnt = final["eval_loss"] < 0.75 * entropy
    succeeded = learnt and shared == equal and codes == [0, 0, 0] and bool(sample) and watching
    say("Done." if succeeded else "Failed: see the summary above.")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
