"""The searches and walks of the machine that forms groups find nothing, and would find something."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import model_check
from scripts.testing.meeting import mutations
from scripts.testing.meeting.mutations import Mutant, mutants, notice
from scripts.testing.meeting.search import search
from scripts.testing.meeting.walks import walk
from spes_swarm.protocol.meeting import meeting
from spes_swarm.protocol.meeting.gathering import Gathering
from spes_swarm.protocol.meeting.leading import Leading

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("faults", [{"freezes": 1, "losses": 1}, {"crashes": 1, "losses": 1}])
def test_two_peers_meet_in_all_interleavings_with_two_faults(faults: dict[str, int]) -> None:
    found = search(2, **faults)
    assert found.problem is None, found.trace
    assert found.complete


def test_three_peers_meet_in_the_first_interleavings_with_a_crash() -> None:
    found = search(3, crashes=1, most=1_500)
    assert found.problem is None, found.trace
    assert found.states == 1_500


@pytest.mark.parametrize(("honest", "hostile"), [(2, 0), (3, 0), (4, 0), (4, 1), (6, 2)])
def test_peers_stay_together_on_random_walks(honest: int, hostile: int) -> None:
    rounds = 0
    for seed in range(4):
        problems, walked = walk(seed, honest, hostile, faults=8)
        assert not problems, "\n".join(walked.trace[-60:])
        rounds += walked.rounds
    assert rounds > 40  # commits


def test_a_search_finds_a_leader_that_closes_a_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Leading._close

    def close_at_once(self: Leading, number: int, gathering: Gathering) -> None:
        state = self._state
        if present := gathering.present(state.now):
            state.close(state.form(number, present.values()), state.view.me)
        close(self, number, gathering)

    monkeypatch.setattr(Leading, "_close", close_at_once)
    found = search(2)
    assert found.problem is not None
    assert found.trace


def test_a_walk_finds_a_leader_that_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "awaits", lambda self, peer, now, late_until: False)
    assert all(walk(seed, 4, 0, 6)[0] for seed in range(3))


def test_a_search_finds_a_machine_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leading, "_close", lambda self, number, gathering: None)
    assert search(2).problem == "a peer that runs has no group and is not behind"


def test_a_statement_that_is_left_out_is_noticed() -> None:
    chosen = next(
        each for each in mutants() if each[0].change == "drop: state.close(state.form(number, sealed), view.me)"
    )
    assert notice(*chosen) is not None


def test_the_machine_as_it_is_passes_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "_WALKS", 1)  # tests are short
    monkeypatch.setattr(mutations, "_STATES", 500)
    assert meeting.__file__ is not None
    same = Mutant(meeting.__name__, 0, "none")
    assert notice(same, Path(meeting.__file__).read_text(encoding="utf-8")) is None


def test_the_command_says_what_it_has_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_check.main(["search", "--peers", "2"]) == 0
    assert model_check.main(["walk", "--honest", "3", "--walks", "2"]) == 0
    said = capsys.readouterr().out
    assert "states, all: no problem" in said
    assert "2 walks" in said
