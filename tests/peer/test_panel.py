"""What a person reads of a peer while it trains."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from spes_swarm.metrics import events
from spes_swarm.peer.panel import LivePanel, round_line, said_fault
from spes_swarm.port.messages import SwarmView
from spes_swarm.protocol.members.twin import TWIN
from spes_swarm.protocol.rounds.track_record import STANDSTILL
from spes_swarm.training.setup import TrainingStatus


def status(round_number: int, peers: int = 3) -> TrainingStatus:
    """After a round; the loss on held-out text was last measured in round 20."""
    measured = TrainingStatus(round=round_number, peers=peers, loss=2.12345, tokens_per_second=1234.5)
    measured.eval_loss, measured.eval_loss_stderr, measured.eval_round = 2.2189, 0.04, 20
    return measured


def test_the_line_of_a_round_has_the_eval_loss_only_if_it_was_measured_then() -> None:
    assert round_line(status(20)).startswith("round 20: 3 peers, loss 2.123, eval loss 2.219 ± 0.040, 1,234 tokens/s, ")
    assert round_line(status(21)).startswith("round 21: 3 peers, loss 2.123, 1,234 tokens/s, ")
    assert round_line(TrainingStatus(round=1)).startswith("round 1: 1 peer, loss -, 0 tokens/s, ")


def shown(of: TrainingStatus, view: SwarmView | None = None) -> str:
    """The panel as text, with single spaces."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    with LivePanel(console, of, "title", Path("runs/me/metrics.jsonl"), lambda: view):
        pass
    return " ".join(output.getvalue().split())


def test_the_panel_says_of_which_round_the_eval_loss_is() -> None:
    assert "2.219 ± 0.040 (round 20)" in shown(status(23))
    assert "(round" not in shown(TrainingStatus())


def test_the_panel_shows_the_share_of_the_peak_where_it_is_known() -> None:
    known = status(23)
    known.teraflops, known.mfu = 412.34, 0.4167
    assert "TFLOP/s 412 MFU 41.7 %" in shown(known)
    assert "TFLOP/s 0 MFU - " in shown(TrainingStatus())


def test_the_panel_names_the_last_fault_and_where_all_are() -> None:
    known = status(23)
    assert "last fault" not in shown(known)
    known.note_fault("round", "no peer answered")
    known.note_fault("dead_expert", "expert 7 of layer 1 is dead\x1b[2J\n[bold]")
    panel = shown(known)
    assert "faults seen 2" in panel
    assert "last fault: dead_expert: expert 7 of layer 1 is dead [2J [bold]" in panel  # without control characters
    assert "all faults: grep fault runs/me/metrics.jsonl" in panel
    assert "no peer answered" not in panel


def view(**changes: Any) -> SwarmView:
    return SwarmView(3, 3, 3, 0, 0.0, 0.0, 0.0, 0, 8, **changes)


def test_the_panel_names_who_is_excluded_or_without_duty_if_anybody_is() -> None:
    for nobody in (None, view()):
        assert "excluded" not in shown(status(23), nobody)
        assert "without duty" not in shown(status(23), nobody)
    many = tuple(f"QmPeer{n:08}" for n in range(8))
    panel = shown(status(23), view(excluded=("QmSomebodyLiar1234",), without_duty=many))
    assert "excluded: Liar1234 " in panel
    assert "without duty: 00000000, 00000001, 00000002, 00000003, 00000004, 00000005 and 2 more" in panel


def test_a_lie_is_printed_with_the_peer_once_and_other_faults_are_not() -> None:
    def said(kind: str) -> str | None:
        return said_fault(events.Fault(kind=kind, peer="QmLiar", detail="it lied in round 7; it is excluded"))

    assert said("proven") == "peer QmLiar: it lied in round 7; it is excluded"
    assert said(TWIN) == said(STANDSTILL) == "it lied in round 7; it is excluded"
    assert said("duty") is said("audit") is None
