"""scripts/study.py: arms mean what they say, runs repeat and resume, and the table's arithmetic holds."""

from __future__ import annotations

import json
import math
import multiprocessing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

from scripts.study import main
from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from scripts.testing.sequential_swarm import SequentialPeer, SequentialSwarm, own_orders
from scripts.testing.study.arm import Arm, OuterConfig, Study, read_study
from scripts.testing.study.course import Outcome, run_arm
from scripts.testing.study.momentum import share_momentum
from scripts.testing.study.outer import OuterNesterov
from scripts.testing.study.peers import initial_holdings, peer_sampler, room_of, rules_of
from scripts.testing.study.results import key_of, settings_of
from scripts.testing.study.running import run_missing
from scripts.testing.study.table import Estimate, make_table, steps_to, to_markdown
from spes_swarm.base.errors import CapacityError, ConfigError, DataError
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.sampler import TokenStream
from spes_swarm.model.sparse_model import SparseModel, build_model, layout_of
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.training.gradients import Gradients, loss_weights
from spes_swarm.training.optimiser.adamw import PeerAdamW
from tests.helpers.repository import ROOT
from tests.helpers.swarm import TINY_RUN, merged

BASE = merged(
    TINY_RUN,
    {
        "round": {"inner_steps": 2, "codec": "fp32", "clip": 0.0},
        "ownership": {"replicas": 1},
        "evaluation": {"holdout_fraction": 0.1, "sequences": 4},
        "merge": {"alpha": 0.0},
    },
)


def study_file(directory: Path, arms: dict[str, Any], **others: Any) -> Path:
    base, path = directory / "base.yaml", directory / "study.yaml"
    base.write_text(yaml.safe_dump({"run": BASE}), encoding="utf-8")
    content = {"base": str(base), "steps": 4, "seeds": [0], "evaluations": 2, **others, "arms": arms}
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def read(directory: Path, arms: dict[str, Any], **others: Any) -> Study:
    return read_study(study_file(directory, arms, **others))


def one(directory: Path, **arm: Any) -> Arm:
    return read(directory, {"only": arm}).arms[0]


# What the modes mean.


def test_a_lone_peer_is_a_swarm_of_one(tmp_path: Path, stream: TokenStream) -> None:
    lone, swarm = (run_arm(one(tmp_path, mode=mode, peers=1), 0, stream, 2) for mode in ("lone", "swarm"))
    assert lone.digest == swarm.digest
    assert lone.bytes_per_step == 0
    assert lone.tokens == 4 * 2 * 64


def test_one_process_trains_on_the_sequences_of_all_peers(tmp_path: Path, stream: TokenStream) -> None:
    """Compared with a plain loop, without rounds, over the peers' batches side by side."""
    arm = one(tmp_path, mode="central", peers=3)
    outcome = run_arm(arm, 5, stream, 2)
    run = arm.with_seed(5)
    module = build_model(run.model.type, run.model.settings, 5, "cpu")
    model = SparseModel(module, range(run.model.num_experts))
    optimiser = PeerAdamW(model.param_groups(run.training.weight_decay), lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    weights = loss_weights(run.training)
    gradients = Gradients(model, weights, 64, device=torch.device("cpu"), autocast=nullcontext, warn=lambda *_: None)
    samplers = own_orders(run, stream, range(3))
    for step in range(4):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, run.training)
        gradients.compute(np.concatenate([sampler.next_batch(2) for sampler in samplers]), progress=step / 4)
        torch.nn.utils.clip_grad_norm_(module.parameters(), run.training.max_grad_norm)
        optimiser.step()
    (batch_BS,) = samplers[0].evaluation_batches(4, 4)
    tokens_BS = torch.from_numpy(batch_BS)
    with torch.no_grad():
        logits_BVS = module(tokens_BS).logits[:, :-1].transpose(1, 2)
    assert outcome.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits_BVS, tokens_BS[:, 1:])), rel=1e-5
    )
    assert outcome.tokens == 3 * 4 * 2 * 64


def test_outer_momentum_is_that_of_torch(tmp_path: Path, stream: TokenStream) -> None:
    outer = OuterNesterov(OuterConfig(learning_rate=0.7, momentum=0.9))
    weights = torch.nn.Parameter(torch.zeros(5))
    reference_N = np.zeros(5, dtype=np.float32)
    sgd = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    rng = np.random.default_rng(0)
    for _ in range(4):
        difference_N = rng.standard_normal(5, dtype=np.float32)
        reference_N = outer.step(reference_N, reference_N + difference_N)
        weights.grad = torch.from_numpy(-difference_N)
        sgd.step()
    np.testing.assert_allclose(reference_N, weights.detach().numpy(), rtol=1e-5)
    assert reference_N.dtype == np.float32
    plain = run_arm(one(tmp_path, mode="fedavg", peers=2), 0, stream, 1)
    neutral = one(tmp_path, mode="diloco", peers=2, outer={"learning_rate": 1.0, "momentum": 0.0})
    pushed = one(tmp_path, mode="diloco", peers=2)
    # before + 1.0 * (after - before) differs from `after` in the last bits.
    assert run_arm(neutral, 0, stream, 1).loss == pytest.approx(plain.loss, rel=1e-5)
    assert run_arm(pushed, 0, stream, 1).loss != pytest.approx(plain.loss, rel=1e-3)


def momenta_of(peer: SequentialPeer) -> dict[tuple[str, int | None], torch.Tensor]:
    parameters, found = dict(peer.model.trainable_parameters()), {}
    for slot in (slot for block in peer.model.layout.trained_blocks(peer.model.held) for slot in block.slots):
        if "momentum_buffer" in peer.optimiser.moment_names(parameters[slot.name]):
            momentum = torch.empty(parameters[slot.name].shape)
            peer.optimiser.read_moment(parameters[slot.name], "momentum_buffer", momentum.view(-1))
            own = momentum if slot.expert is None else momentum[peer.model.held.index(slot.expert)]
            found[slot.name, slot.expert] = own.reshape(-1)
    return found


def test_shared_momentum_is_the_mean_of_the_holders(tmp_path: Path, stream: TokenStream) -> None:
    run = one(tmp_path, set={"training.optimiser": "muon"}).with_seed(0)
    # Experts 0 and 3 to 7 have one holder, expert 1 three, and expert 2 two, of which the last peer is new to it.
    swarm = SequentialSwarm(run, own_orders(run, stream, range(3)), [(0, 1, 2), (1, 3, 4, 5), (1, 2, 6, 7)])
    generator, newcomer = torch.Generator().manual_seed(0), swarm.peers[2]
    for peer in swarm.peers:
        for name, parameter in peer.model.trainable_parameters():
            if "momentum_buffer" in peer.optimiser.moment_names(parameter):
                momentum = torch.randn(parameter.shape, generator=generator)
                if "experts" in name and peer is newcomer:
                    momentum[1] = 0.0
                peer.optimiser.write_moment(parameter, "momentum_buffer", momentum.view(-1))
    before = [momenta_of(peer) for peer in swarm.peers]
    num_bytes = share_momentum(swarm.peers, get_codec("fp32"))
    for peer in swarm.peers:
        for key, momentum_N in momenta_of(peer).items():
            counted = [own[key] for own in before[: 2 if key[1] == 2 else 3] if key in own]
            torch.testing.assert_close(momentum_N, torch.stack(counted).mean(0))
    shared, expert = (sum(each.numel() for (_, of), each in before[0].items() if of == expert) for expert in (None, 1))
    assert shared > 0
    # To the reducer and back: shared layers and expert 1 from two others, and expert 2 back to the newcomer only.
    assert num_bytes == 4 * (4 * shared + 4 * expert + expert)
    arm = {"set": {"training.optimiser": "muon"}, "peers": 2}
    own, mean = (run_arm(one(tmp_path, **arm, share_momentum=codec), 0, stream, 1) for codec in (None, "fp32"))
    assert own.digest != mean.digest
    assert mean.bytes_per_step > own.bytes_per_step


def test_peers_read_the_same_text_in_every_arm(tmp_path: Path, stream: TokenStream) -> None:
    few, many = (one(tmp_path, peers=peers) for peers in (2, 4))
    for number in range(2):
        first_BS, second_BS = (
            peer_sampler(arm.config, arm.with_seed(3), stream, number).next_batch(8) for arm in (few, many)
        )
        np.testing.assert_array_equal(first_BS, second_BS)


def test_shards_are_disjoint_and_avoid_the_held_out_text(tmp_path: Path, stream: TokenStream) -> None:
    arm = one(tmp_path, data="shards", peers=3)
    samplers = [peer_sampler(arm.config, arm.with_seed(0), stream, number) for number in range(3)]
    text = np.array(stream.files[0].tokens, dtype=np.int64)
    places = [sorted(_places(text, sampler.next_batch(30))) for sampler in samplers]
    assert places[0][-1] < places[1][0]
    assert places[1][-1] < places[2][0]
    (held_out_BS,) = own_orders(arm.with_seed(0), stream, [0])[0].evaluation_batches(4, 4)
    for place in _places(text, held_out_BS):
        assert all(abs(place - other) >= 64 for of_peer in places for other in of_peer)


def _places(text_N: np.ndarray[Any, Any], windows_BS: np.ndarray[Any, Any]) -> list[int]:
    whole, width = text_N.astype("<u2").tobytes(), 2
    return [whole.index(window_S.astype("<u2").tobytes()) // width for window_S in windows_BS]


@pytest.mark.parametrize(("peers", "replicas"), [(4, 1), (4, 2), (8, 2), (2, 1), (3, 1)])
def test_every_expert_has_as_many_holders_as_the_target(tmp_path: Path, peers: int, replicas: int) -> None:
    run = one(tmp_path, peers=peers, set={"ownership.replicas": replicas}).run
    room = room_of(run, peers)
    held = initial_holdings(8, peers, room, rules_of(run, room))
    assert sorted(expert for each in held for expert in each) == sorted([*range(8)] * replicas)
    assert max(map(len, held)) == math.ceil(8 * replicas / peers)


# What is counted.


@pytest.mark.parametrize(
    ("arm", "shared_copies", "expert_copies"),
    [
        # To the reducers of the other quarters, and three results of each quarter; an expert's holder reduces it.
        ({"set": {"ownership.replicas": 1}}, 3 + 3, 3),
        ({"set": {"ownership.replicas": 2}}, 3 + 3, 1 + 3),  # each holder sends the half that the other one reduces
        ({"mode": "fedavg"}, 3 + 3, 3 + 3),
        ({"mode": "central"}, 0, 0),
    ],
)
def test_bytes_against_a_count_by_hand(
    tmp_path: Path, stream: TokenStream, arm: dict[str, Any], shared_copies: int, expert_copies: int
) -> None:
    chosen = one(tmp_path, peers=4, steps=2, **arm)
    layout = layout_of(build_model(chosen.run.model.type, chosen.run.model.settings, 0, "cpu"))
    experts = 8 * layout.expert_block(0).size
    shared = layout.num_elements - experts
    of_all = 4 * (shared_copies * shared + expert_copies * experts)  # fp32
    assert run_arm(chosen, 0, stream, 1).bytes_per_step == pytest.approx(of_all / 4 / 2, rel=1e-9)


def test_churn_and_slow_peers_repeat_to_the_bit(tmp_path: Path, stream: TokenStream) -> None:
    arm = one(tmp_path, steps=12, speeds=[1.0, 0.5], churn={"share": 0.25, "every_rounds": 2, "absent_rounds": 1})
    first, second = (run_arm(arm, 0, stream, 3) for _ in range(2))
    assert first.digest == second.digest
    assert first.curve == second.curve
    assert [steps for steps, _ in first.curve] == [4, 8, 12]
    # One of four peers is absent for a round after rounds 2 and 4, and two of eight experts are trained by nobody.
    assert first.holders == pytest.approx((4 * 8 + 2 * 6) / 6 / 8)
    # Peers do 12 steps on average; the two slow ones do half as many as the two fast ones.
    assert run_arm(one(tmp_path, steps=12, speeds=[1.0, 0.5]), 0, stream, 1).tokens == 4 * 12 * 2 * 64


def test_sudden_deaths_lose_work(tmp_path: Path, stream: TokenStream) -> None:
    churn = {"share": 0.25, "every_rounds": 1}
    orderly, sudden = (
        run_arm(one(tmp_path, churn={**churn, "sudden": sudden}), 0, stream, 1) for sudden in (False, True)
    )
    assert orderly.holders == 1.0
    assert sudden.holders == 0.75
    assert orderly.digest != sudden.digest


# The table.


def outcome(loss: float | None, bytes_per_step: float = 0.0) -> Outcome:
    return Outcome(
        seed=0,
        loss=loss,
        curve=[],
        bytes_per_step=bytes_per_step,
        holders=1.0,
        tokens=1,
        digest="",
        seconds=2.0,
    )


def numbers(estimate: Estimate | None) -> tuple[float, float]:
    assert estimate is not None
    assert estimate.stderr is not None
    return estimate.mean, estimate.stderr


def test_the_table_against_a_calculation_by_hand(tmp_path: Path) -> None:
    study = read(
        tmp_path, {"a": {}, "b": {"mode": "fedavg"}, "c": None}, steps=100, seeds=[0, 1], lone_steps=[100, 400]
    )
    results = {
        ("a", 0): outcome(3.0, 10.0),
        ("a", 1): outcome(3.2, 10.0),
        ("b", 0): outcome(2.5, 25.0),
        ("b", 1): outcome(2.9, 25.0),
        ("c", 0): outcome(None, 10.0),
        ("lone", 100): outcome(3.1),
        ("lone", 400): outcome(2.1),
    }

    def lookup(arm: Arm, seed: int) -> Outcome | None:
        return results.get(("lone", arm.config.steps) if arm.config.mode == "lone" else (arm.name, seed))

    a, b, c = make_table(study, lookup)
    assert numbers(a.loss) == pytest.approx((3.1, 0.1))
    assert numbers(b.loss) == pytest.approx((2.7, 0.2))
    assert a.against_baseline is None
    assert numbers(b.against_baseline) == pytest.approx((-0.4, 0.1))
    assert b.bytes == 2.5
    assert a.efficiency is not None
    assert b.efficiency is not None
    assert a.efficiency.ratio.mean == pytest.approx(1.0)
    # 40 % of the way from 100 to 400 steps, in logarithms; without either seed: 60 % (loss 2.5) and 20 % (2.9).
    assert numbers(b.efficiency.ratio) == pytest.approx((4**0.4, (4**0.6 - 4**0.2) / 2))
    assert c.loss is None
    assert c.diverged == 1
    lines = to_markdown([a, b, c]).splitlines()
    assert lines[3] == "| b | 2 | 2.7000 ± 0.2000 | -0.4000 ± 0.1000 | 1.74 ± 0.49 | 2.50 | 1.00 | 2 |"
    assert lines[4] == "| c | 1 | diverged | - | - | 1.00 | 1.00 | 2 |"


def test_steps_of_a_lone_peer_beyond_its_runs() -> None:
    lengths, losses = [100, 200, 400], [3.0, 3.1, 2.0]  # the middle one is an accident
    assert steps_to(3.05, lengths, losses) == (100.0, "<")
    assert steps_to(1.9, lengths, losses) == (400.0, ">")
    assert steps_to(3.0, lengths, losses) == (100.0, "")
    for loss, steps in ((2.5, 200.0), (2.0, 400.0)):
        found, bound = steps_to(loss, lengths, losses)
        assert found == pytest.approx(steps)
        assert bound == ""


def test_lone_peers_have_the_arms_settings_but_for_those_that_are_tuned_for_them(tmp_path: Path) -> None:
    tuned = {"training.learning_rate": 0.5}
    arms = {"a": {"set": {"training.learning_rate": 0.25, "training.weight_decay": 0.125}}}
    (lone,) = read(tmp_path, arms, lone_steps=[7], lone_set=tuned).lone["a"]
    training = lone.run.training
    assert (training.learning_rate, training.weight_decay, training.total_steps) == (0.5, 0.125, 7)


# The file and the command.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"arms": {}}, "arms: found none, expected a section with a key for each arm"),
        ({"arms": {"x": {}}, "step": 3}, "step: unknown key, did you mean steps?"),
        (
            {"arms": {"x": {"mode": "alone"}}},
            "arms.x.mode: found 'alone', expected swarm, fedavg, diloco, central or lone",
        ),
        ({"arms": {"x": {"sets": {}}}}, "arms.x.sets: unknown key, did you mean set?"),
        ({"arms": {"x": {"set": {"round.iner_steps": 3}}}}, "arms.x.set: round.iner_steps: unknown key"),
        (
            {"arms": {"x": {"set": {"rounds.codec": "fp16"}}}},
            "arms.x.set: rounds.codec: unknown key, did you mean round",
        ),
        ({"arms": {"x": {"set": {"round.codec": "fp8"}}}}, "arms.x.set: round.codec: found 'fp8', expected one of"),
        ({"arms": {"x": {"mode": "lone", "churn": {"share": 0.1}}}}, "arms.x.churn: found with mode lone"),
        ({"arms": {"x": {"peers": 2, "speeds": [1, 1, 1]}}}, "arms.x.speeds: found 3 of them, expected at most 2"),
        ({"arms": {"x": {"like": "y"}, "y": {}}}, "arms.x.like: found 'y', expected the name of an arm above"),
        ({"arms": {"x": 3}}, "arms.x: found 3, expected a section of keys"),
        ({"arms": {"x": {"share_momentum": "fp16"}}}, "arms.x.share_momentum: found with optimiser adamw"),
        ({"arms": {"x": {"share_momentum": "fp8"}}}, "arms.x.share_momentum: found 'fp8', expected one of fp32, fp16"),
        ({"arms": {"x": {}}, "baseline": "y"}, "baseline: found 'y', expected the name of an arm"),
        ({"arms": {"x": {}}, "seeds": []}, "seeds: found [], expected at least one, each once"),
        ({"arms": {"x": {}}, "seeds": [1, 1]}, "seeds: found [1, 1], expected at least one, each once"),
    ],
)
def test_a_bad_setting_is_one_clear_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_study(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_an_arm_like_another_one_adds_to_it(tmp_path: Path) -> None:
    arms = {
        "a": {"peers": 2, "set": {"round.inner_steps": 4, "round.codec": "fp16"}},
        "b": {"like": "a", "mode": "fedavg", "set": {"round.inner_steps": 3}},
        "c": {"like": "b", "peers": 3},
        "d": {},
    }
    found = [
        (arm.config.peers, arm.config.mode, arm.run.round.inner_steps, arm.run.round.codec)
        for arm in read(tmp_path, arms, set={"round.inner_steps": 5}).arms
    ]
    assert found == [
        (2, "swarm", 4, "fp16"),
        (2, "fedavg", 3, "fp16"),
        (3, "fedavg", 3, "fp16"),
        (4, "swarm", 5, "fp32"),
    ]


def test_the_files_in_the_repository_are_valid() -> None:
    for path in sorted((ROOT / "scripts" / "study").glob("*.yaml")):
        assert len(read_study(path).arms) > 1, path


def test_finished_runs_are_not_made_again(tmp_path: Path, text: Path) -> None:
    study = read(tmp_path, {"first": {}, "second": {"mode": "fedavg"}, "as the first": {}}, seeds=[0, 1], peers=2)
    said: list[str] = []
    run_missing(study, str(text), tmp_path, 1, said.append)
    assert said[0] == "4 runs, 0 of them finished before"
    before = {file.name: file.read_bytes() for file in (tmp_path / "runs").iterdir()}
    assert len(before) == 4
    lost, *kept = sorted(before)
    (tmp_path / "runs" / lost).unlink()
    times = {name: (tmp_path / "runs" / name).stat().st_mtime_ns for name in kept}
    run_missing(study, str(text), tmp_path, 1, said.append)
    assert said[5] == "4 runs, 3 of them finished before"
    assert times == {name: (tmp_path / "runs" / name).stat().st_mtime_ns for name in kept}
    again = json.loads((tmp_path / "runs" / lost).read_bytes())["outcome"]
    for values in (again, expected := json.loads(before[lost])["outcome"]):
        del values["seconds"]
    assert again == expected
    (tmp_path / "runs" / lost).write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="delete it to make the run again"):
        run_missing(study, str(text), tmp_path, 1, said.append)


def test_a_run_is_known_by_its_settings_and_not_by_its_name(tmp_path: Path) -> None:
    arms = {
        "plain": {},
        "spelt out": {"mode": "swarm", "set": {"round.codec": "fp32"}},
        "other": {"set": {"round.codec": "fp16"}},
        "alone": {"mode": "lone"},
        "alone among more": {"mode": "lone", "peers": 8, "set": {"ownership.replicas": 2}},
    }
    plain, spelt, other, alone, among = (key_of(settings_of(arm, 0, "data", 2)) for arm in read(tmp_path, arms).arms)
    assert plain == spelt
    assert alone == among
    (first, *_) = read(tmp_path, arms).arms
    distinct = {plain, other, alone, *(key_of(settings_of(first, *rest)) for rest in ((1, "data", 2), (0, "text", 2)))}
    assert len(distinct) == 5


def test_the_command_writes_table_and_figures(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study_file(tmp_path, {"first": {}, "second": {"mode": "fedavg"}}, seeds=[0, 1], peers=2)
    results = tmp_path / "results"
    command = [path, "--data", text, "--output-dir", results, "--jobs", 2]
    assert main([str(each) for each in command]) == 0
    table = (results / "study" / "table.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(table)
    first, second = json.loads((results / "study" / "table.json").read_text(encoding="utf-8"))["rows"]
    assert first["seeds"] == second["seeds"] == [0, 1]
    assert first["loss"] != second["loss"]
    for name in ("losses", "curves", "bytes"):
        assert (results / "study" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


LONG_ARMS = {"short": {}, "long": {"steps": 100_000}, "longer": {"steps": 100_001}}


@pytest.mark.slow
def test_the_workers_of_a_killed_study_end(tmp_path: Path, text: Path) -> None:
    path = study_file(tmp_path, LONG_ARMS, seeds=[0])
    arguments = [str(each) for each in (path, "--data", text, "--jobs", 2)]
    with LocalPeer(tmp_path / "results", arguments, ForkServer(main=main)) as process:
        process.wait_for_text(r"\[1/3\]")
        _, *started = process.kill()
    assert len(started) >= 3  # two workers and the server that has forked them
    assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_a_killed_worker_ends_the_study_and_the_other_workers(tmp_path: Path, text: Path) -> None:
    workers: list[multiprocessing.process.BaseProcess] = []
    others = multiprocessing.active_children()

    def kill(said: str) -> None:
        if said.startswith("[1/3]"):
            workers.extend(child for child in multiprocessing.active_children() if child not in others)
            workers[-1].kill()

    with pytest.raises(CapacityError, match="a process of the study was killed"):
        run_missing(read(tmp_path, LONG_ARMS), str(text), tmp_path, 2, kill)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_what_cannot_be_used_ends_the_command_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("study: ")
