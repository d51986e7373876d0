"""The benchmark of signed exchanges and audits: peers that do neither, and the table of what that saves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_audits
from scripts.bench_audits import FIGURES, Swarm
from scripts.testing.unsigned_peer import FunctionClock, unsigned
from spes_swarm.protocol.bitmap import bitmap
from spes_swarm.protocol.rounds.frames import Frame
from tests.helpers import rounds
from tests.helpers.rounds import FakePeer, hold_round, peer, small_layout

LAYOUT = small_layout(4, shared=2400)
HOLDINGS = ([0, 1], [1], [2])


def trained_peers() -> list[FakePeer]:
    rng = np.random.default_rng(3)
    start_N = rng.normal(0, 0.1, LAYOUT.num_elements).astype(np.float32)
    peers = [peer(LAYOUT, start_N, held, tokens=100, routed=(100,) * len(held)) for held in HOLDINGS]
    for who in peers:
        for block in LAYOUT.trained_blocks(who.held):
            who.live_N[block.start : block.stop] += rng.normal(0, 0.01, block.size).astype(np.float32)
    return peers


def test_an_unsigned_exchange_has_the_same_result_and_sends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed, returned = list[Frame](), list[Frame]()
    signed_peers, unsigned_peers = trained_peers(), trained_peers()

    def noted(frames: list[Frame], frame: Frame) -> bool:
        frames.append(frame)
        return False  # it is not lost

    hold_round(signed_peers, 1)
    with unsigned() as state, monkeypatch.context() as patched:
        patched.setattr(rounds, "RoundState", state)
        plan, states = hold_round(
            unsigned_peers,
            1,
            lose_push=lambda sender, frame: noted(pushed, frame),
            lose_result=lambda receiver, frame: noted(returned, frame),
        )
    assert {frame.extra for frame in pushed} == {b""}
    assert len(returned) > len(plan.parts)
    contributors = [{c.member for c in plan.block_of(plan.parts[frame.part]).contributions} for frame in returned]
    assert [frame.extra for frame in returned] == [bitmap(members, len(HOLDINGS)) for members in contributors]
    assert not any(state.missing() for state in states)
    for one, other in zip(signed_peers, unsigned_peers, strict=True):
        np.testing.assert_array_equal(one.live_N, other.live_N)
        np.testing.assert_array_equal(one.reference.values_N, other.reference.values_N)


def test_the_table_compares_the_swarms_of_each_seed() -> None:
    pairs = {0: (1.0, 1.5), 1: (2.0, 2.2)}
    swarms = [
        Swarm(variant, seed, dict.fromkeys(FIGURES, value))
        for seed, pair in pairs.items()
        for variant, value in zip(bench_audits.VARIANTS, pair, strict=True)
    ]
    lines = bench_audits.table(swarms[::-1]).splitlines()
    assert [line.split()[-5:] for line in lines[1:]] == [["1.5", "1.85", "+30.00%", "+10.00%", "+50.00%"]] * 6


def test_a_fault_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(variant: str, seed: int, *rest: object) -> Swarm:
        return Swarm(variant, seed, dict.fromkeys(FIGURES, 1.0), troubles=["peer 3: late: too slow"] * seed)

    monkeypatch.setattr(bench_audits, "measure", measured)
    json_file = str(tmp_path / "audits.json")
    assert bench_audits.main(["--seeds", "1", "--json", json_file]) == 0
    assert bench_audits.main(["--seeds", "2", "--json", json_file]) == 1
    assert capsys.readouterr().out.count("FAULT peer 3: late: too slow\n") == 2
    written = [(swarm["seed"], swarm["variant"]) for swarm in json.loads(Path(json_file).read_text())["swarms"]]
    assert written == [(0, "unsigned"), (0, "signed"), (1, "signed"), (1, "unsigned")]


def test_a_functions_time_is_without_that_of_functions_in_it(tmp_path: Path) -> None:
    clock = FunctionClock(tmp_path / "functions.json")

    def busy(seconds: float) -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < seconds:
            pass

    inner = clock.timed("inner", busy)

    def outer() -> None:
        inner(0.02)
        busy(0.01)

    clock.timed("outer", outer)()
    clock.timed("audits: all", inner)(0.01)  # is one of the audits' own
    clock.write()
    written = json.loads((tmp_path / "functions.json").read_text())
    assert {name: calls for name, (_, calls) in written.items()} == {"inner": 1, "outer": 1, "audits: all": 1}
    assert written["inner"][0] >= 0.02
    assert 0.01 <= written["outer"][0] < 0.02
