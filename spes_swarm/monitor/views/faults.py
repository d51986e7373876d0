"""Who is excluded or without duty, and why: what `--faults` prints."""

from __future__ import annotations

import json
import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spes_swarm.monitor.figures import by_words, lie_words, peer_words
from spes_swarm.monitor.state import Accused, Excluded, SwarmState


def faults_text(state: SwarmState) -> str:
    """One line of JSON, with the fields as in the schema of the state."""
    values = state.to_json()
    shown = {key: values[key] for key in ("schema", "time", "status", "round", "excluded", "without_duty")}
    return json.dumps({"run_id": state.run.run_id, **shown}, sort_keys=True, allow_nan=False)


def print_faults(console: Console, state: SwarmState) -> None:
    """Prints a table, and below it the whole peer id of each excluded peer with its proof."""
    where = f"{state.run.run_id}, round {state.round}, {peer_words(state)}"
    if not state.excluded and not state.without_duty:
        _say(console, f"{where}: nobody is excluded or without duty")
        return
    _say(console, where)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("peer", "is", "since", "named by", "why"):
        table.add_column(title, vertical="top", overflow="fold", no_wrap=title in ("since", "named by"))
    for one in state.excluded:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.since))
        table.add_row(*map(Text, (_name(one), _reputation(one), since, by_words(one), lie_words(one))))
    for other in state.without_duty:
        kinds = ", ".join(other.kinds) or "-"
        table.add_row(*map(Text, (_name(other), "without duty", f"round {other.since}", by_words(other), kinds)))
    console.print(table)
    for one in state.excluded:
        _say(console, f"{one.peer_id}: {_proof_words(one)}")
    for line in _hints(state):
        _say(console, line)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _name(one: Accused) -> str:
    return f"{one.name or '-'} ({one.peer_id[-8:]})"


def _reputation(one: Excluded) -> str:
    if one.verified:
        return "excluded"
    return "unproven" if 2 * one.by > one.of else "claimed"


def _proof_words(one: Excluded) -> str:
    if one.proof is not None:
        return one.proof
    return "verified, not saved" if one.verified else "not verified: this monitor has got no proof"


def _hints(state: SwarmState) -> list[str]:
    lines = []
    if any(one.verified and one.proof is None for one in state.excluded):
        lines.append("to get the proofs, give --proofs DIR, or look into OUTPUT_DIR/proofs of a member")
    if state.run.admission != "open" and not all(one.verified for one in state.excluded):
        lines.append("a private run gives proofs to members and their monitors: give --invitation")
    return lines
