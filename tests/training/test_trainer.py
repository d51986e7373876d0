"""The training loop by itself: what it writes down, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spes_swarm.base.errors import RoundError
from spes_swarm.port.messages import CaughtUp, RoundReport, SwarmView
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.storage.checkpoint import load_newest
from tests.helpers.lone_trainer import HELD, LoneTrainer, StubNetwork, read_events, run_config
from tests.helpers.memory_swarm import memory_swarm
from tests.helpers.model_state import merge_flat

Make = Callable[..., LoneTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes trainers whose files are closed when the test ends."""
    with ExitStack() as stack:

        def make_one(changes: dict[str, Any] | None = None, **setup: Any) -> LoneTrainer:
            peer = LoneTrainer(tmp_path, run_config(**(changes or {})), **setup)
            stack.callback(peer.close)
            return peer

        yield make_one


@pytest.mark.slow
def test_a_peer_that_leaves_just_after_a_commit_writes_and_reports_that_round_too(make: Make) -> None:
    """Its last round, the goodbye, begins before the traffic of the one before is known."""
    peer = make({"round": {"stall_timeout_s": 0.1}})
    peer.network.others = 1
    peer.port.unanswered = {"traffic"}
    peer.network.on_traffic = lambda: peer.stop.set() if peer.network.reference.round == 3 else None
    peer.trainer.run()
    assert [event["round"] for event in peer.events("round")] == [1, 2, 3, 4]
    assert peer.network.reported == {1, 2, 3, 4}


def test_a_peer_that_leaves_right_after_its_first_contact_leaves_its_work_in_a_round(make: Make) -> None:
    """It learns only then that the founder trains, and its first attempt comes before the founder can lead."""
    peer = make({"round": {"inner_steps": 100}})
    peer.network.ready = ("founder",)
    views = iter(range(1000))
    see, next_batch = peer.network.view, peer.setup.sampler.next_batch

    async def view() -> SwarmView:
        if peer.stop.is_set() and next(views) == 3:
            peer.network.others = 1
        return await see()

    def next_batch_and_stop(batch_size: int) -> NDArray[np.int64]:
        if peer.trainer._learner.step == 2:
            peer.stop.set()
        return next_batch(batch_size)

    def refuse(network: StubNetwork) -> RoundReport:
        raise RoundError("no peer that could lead the round is reachable")

    peer.network.view = view  # type: ignore[method-assign]
    peer.setup.sampler.next_batch = next_batch_and_stop  # type: ignore[method-assign]
    peer.network.answers = [refuse, refuse]
    peer.trainer.run()
    assert len(peer.events("step")) == 3
    assert [event["round"] for event in peer.events("round")] == [1]
    assert [event["kind"] for event in peer.events("fault")] == ["round", "round"]


def test_a_peer_without_others_leaves_at_once(make: Make) -> None:
    peer = make({"round": {"inner_steps": 100}})
    next_batch = peer.setup.sampler.next_batch

    def next_batch_and_stop(batch_size: int) -> NDArray[np.int64]:
        peer.stop.set()
        return next_batch(batch_size)

    peer.setup.sampler.next_batch = next_batch_and_stop  # type: ignore[method-assign]
    peer.trainer.run()
    assert not peer.events("round")
    assert not peer.events("fault")


def test_a_merge_that_falls_due_while_catching_up_is_applied(make: Make) -> None:
    """As by a peer that took part: foreign experts are merged, held ones move by what the merge changes."""
    peer = make({"merge": {"alpha": 0.5, "steps": 1000, "interval": 20, "neighbours": 2}})
    layout, rng = peer.model.layout, np.random.default_rng(0)
    work_N = np.zeros(layout.num_elements, dtype=np.float32)

    def catch_up(network: StubNetwork) -> CaughtUp:
        """Round 13: of the merges at steps 20, 40 ... 120, this peer has seen none."""
        reference = network.reference
        reference.values_N += rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
        for index in (0, *(1 + expert for expert in HELD)):
            block = layout.blocks[index]
            work_N[block.start : block.stop] = 0.01
            network.contribution_N[block.start : block.stop] = reference.values_N[block.start : block.stop] + 0.01
        reference.finish(13, [(block.index, 13) for block in layout.blocks])
        return CaughtUp(round=13, why="asleep", seconds=0.0, payload_bytes=0, complete=True)

    peer.network.answers.append(catch_up)
    assert peer.trainer._rounds.begin(leaving=False)
    peer.trainer._rounds.end()
    live_N = peer.live()
    # At step 130 of 1000 the strength is 0.5 * (1 - 0.13).
    expected_N = merge_flat(peer.network.reference.values_N, layout, 0.435, 2) + work_N
    np.testing.assert_allclose(live_N, expected_N, atol=1e-6)
    assert not np.allclose(live_N, peer.network.reference.values_N + work_N, atol=1e-3)


def test_rounds_and_learning_rates_follow_the_schedule_of_inner_steps(make: Make) -> None:
    """From step 6 on rounds are twice as long; alone, a peer does exactly its inner steps."""
    schedule = {"inner_steps": 3, "inner_steps_later": [[5, 6]]}
    peer = make({"round": schedule, "training": {"warmup_steps": 100}}, max_rounds=4)
    peer.trainer.run()
    steps = peer.events("step")
    assert [event["round"] for event in steps] == [0] * 3 + [1] * 3 + [2] * 6 + [3] * 6
    peak = peer.run.training.learning_rate
    assert [event["lr"] for event in steps] == pytest.approx([peak * (number + 1) / 100 for number in range(18)])


def test_a_checkpoint_from_before_a_merge_takes_part_in_it(make: Make) -> None:
    """A peer that was away while a merge fell due applies it to the experts that only it has trained."""
    peer = make({"merge": {"alpha": 0.5, "steps": 1000, "interval": 20, "neighbours": 2}}, max_rounds=1)
    peer.trainer.run()  # round 1, after step 10: no merge yet
    saved_N = peer.live()
    layout, reference = peer.model.layout, peer.network.reference
    checkpoint, _ = load_newest(peer.setup.checkpoints, "test", "me", layout, set_aside=False)
    assert checkpoint is not None
    # The others have gone on to round 3: all is new but the experts that this peer holds.
    others = [block for block in layout.blocks if block.index not in {1 + expert for expert in HELD}]
    for block in others:
        reference.values_N[block.start : block.stop] += 0.01
    reference.finish(3, [(block.index, 3) for block in others])
    peer.trainer.restore(checkpoint, reference.table)
    # At step 30 of 1000 the strength is 0.5 * (1 - 0.03).
    change_N = merge_flat(reference.values_N, layout, 0.485, 2) - reference.values_N
    for expert in HELD:
        block = layout.expert_block(expert)
        where = slice(block.start, block.stop)
        np.testing.assert_allclose(peer.live()[where], saved_N[where] + change_N[where], atol=1e-6)
        assert np.abs(change_N[where]).max() > 1e-3


SHORT = {"training": {"total_steps": 25, "warmup_steps": 5}}  # over with step 30, which is round 3


@pytest.mark.slow
def test_the_end_of_the_schedule_is_told_once_and_training_goes_on(make: Make) -> None:
    peer = make(SHORT, max_rounds=5)
    peer.trainer.run()
    (event,) = peer.events("schedule_end")
    assert (event["round"], event["steps"], event["total_steps"], event["at_end"]) == (3, 30, 25, "continue")
    assert [event["round"] for event in peer.events("round")] == [1, 2, 3, 4, 5]
    (line,) = peer.said
    assert "schedule is over" in line
    assert "25 steps" in line
    assert "--initial-weights" in line


def test_who_joins_after_the_end_of_the_schedule_is_told_at_once(make: Make) -> None:
    peer = make(SHORT, max_rounds=1)
    peer.network.reference.finish(7, [(0, 7)])
    peer.trainer.load_reference(peer.network.reference.table)
    peer.trainer.run()
    assert [event["round"] for event in peer.events("schedule_end")] == [7]


@pytest.mark.slow
def test_a_run_that_ends_with_its_schedule_ends_with_that_round_and_a_checkpoint(make: Make) -> None:
    peer = make({"training": {**SHORT["training"], "at_end": "stop"}})
    peer.trainer.run()
    assert peer.trainer.run_is_over
    assert [event["round"] for event in peer.events("round")] == [1, 2, 3]
    assert [event["round"] for event in peer.events("schedule_end")] == [3]
    checkpoint, _ = load_newest(peer.setup.checkpoints, "test", "me", peer.model.layout, set_aside=False)
    assert checkpoint is not None
    assert checkpoint.meta.round == 3
    assert peer.network.presences[-2:] == ["waiting", "leaving"]  # first for those whose last round failed


@pytest.mark.slow
def test_the_loss_is_measured_every_so_many_rounds_and_at_both_ends(make: Make) -> None:
    ids_BS = np.arange(3 * 64, dtype=np.int64).reshape(3, 64) % 200
    peer = make({"evaluation": {"every_rounds": 3}}, max_rounds=8, evaluation=[ids_BS])
    peer.trainer.run()
    measured = {event["round"]: event["eval_loss_stderr"] for event in peer.events("round") if event["eval_loss"]}
    assert list(measured) == [1, 3, 6, 8]
    assert all(error > 0 for error in measured.values())
    assert peer.setup.status.eval_loss_stderr == measured[8]


@pytest.mark.slow
def test_a_step_says_how_much_it_computed(make: Make) -> None:
    """At most 6 operations per active weight and token, and fewer because most experts' weights have no gradients."""
    peer = make(max_rounds=1)
    settings: dict[str, Any] = dict(peer.run.model.settings)
    peer.trainer.run()
    event = peer.events("step")[0]
    per_token = event["teraflops"] * 1e12 / event["tokens_per_second"]
    matrices = sum(
        p.numel() for name, p in peer.model.module.named_parameters() if p.dim() == 2 and "embed" not in name
    )
    expert = 3 * settings["hidden_size"] * settings["intermediate_size"]
    active = matrices + settings["num_hidden_layers"] * settings["num_experts_per_tok"] * expert
    attention = 12 * settings["num_hidden_layers"] * settings["hidden_size"] * peer.run.training.sequence_length
    assert 6 * matrices + attention < per_token < 6 * active + attention
    assert event["mfu"] is None  # on a CPU
    assert peer.setup.status.teraflops == pytest.approx(peer.events("step")[-1]["teraflops"])


def test_work_that_was_thrown_away_counts_for_nothing(make: Make) -> None:
    """After beginning again a peer's weight in a round is what it has done since, and nothing is told of the rest."""
    peer = make()
    contributed = peer.statements()
    for _ in range(7):
        peer.trainer._train_step()
    peer.trainer._rounds.restart()
    peer.trainer._train_step()
    assert peer.trainer._rounds.begin(leaving=False)
    peer.trainer._rounds.end()
    one_step = 2 * 64  # sequences times tokens
    ((tokens, routed),) = contributed
    assert tokens == one_step
    # Top 2 of two layers: no more choices than that, whichever of the experts are held.
    assert routed <= 2 * 2 * one_step
    assert peer.trainer._learner.step == 8  # what was done is no secret, but it is not work for a round


@pytest.mark.slow
def test_trainers_that_share_nothing_but_a_port_agree_round_after_round(tmp_path: Path) -> None:
    """Three trainers and their rounds, with no network process, no pipe and no socket between them."""
    peers = memory_swarm(tmp_path, [(0, 1, 2), (3, 4, 5), (6, 7)], max_rounds=4)
    start_N = peers[0].setup.reference_N.copy()
    threads = [threading.Thread(target=peer.trainer.run) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for peer in peers:
        peer.setup.metrics.close()
    first, *others = (read_events(peer.setup.checkpoints.parent / "metrics.jsonl", "round") for peer in peers)
    assert [event["round"] for event in first] == [1, 2, 3, 4]
    for events in others:
        assert [event["digest"] for event in events] == [event["digest"] for event in first]
    for block in peers[0].model.layout.blocks:  # every expert was trained by one of them
        assert not np.array_equal(
            peers[2].setup.reference_N[block.start : block.stop], start_N[block.start : block.stop]
        )
    for peer in peers[1:]:
        np.testing.assert_array_equal(peer.live_shared(), peers[0].live_shared())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keeps_work", [False, True])
def test_a_commit_that_is_taken_back(make: Make, overlap: bool, keeps_work: bool) -> None:
    """The network process has put the weights from before it into the contribution, or this peer had missed it."""
    merge = {"interval": 2}  # due after each round, but not at a return: its weights have been merged before
    # A return does not count as a round.
    peer = make({"round": {"inner_steps": 2, "overlap": overlap}, "merge": merge}, max_rounds=2)
    blocks = (0, *(1 + expert for expert in HELD))
    where = [peer.model.layout.blocks[index].where for index in blocks]
    stated, next_batch = peer.statements(), peer.setup.sampler.next_batch
    after = list[NDArray[np.float32]]()  # live weights before each step after the return

    def look(batch_size: int) -> NDArray[np.int64]:
        if peer.trainer.round == 2:
            after.append(peer.live())
        return next_batch(batch_size)

    def take_back(network: StubNetwork) -> RoundReport:
        for part in () if keeps_work else where:
            network.contribution_N[part] = 0.25
        network.reference.finish(2, [(index, 2) for index in blocks])
        commit = CommitReport(2, ("me", "other"), 0, 0, blocks, 8, taken_back=1, keeps_work=keeps_work)
        return RoundReport(commit, 0.0, 0.0, network.reference.digest.hex(), ExpertChange(network.held), 0)

    peer.setup.sampler.next_batch = look  # type: ignore[method-assign]
    peer.network.answers = [StubNetwork.commit, take_back]
    peer.trainer.run()
    rounds = peer.events("round")
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert [event.get("taken_back") for event in rounds] == [None, 1, None]
    assert rounds[1]["train_loss"] is None
    assert "most peers' loss has risen: the swarm has taken back round 1" in peer.said
    (tokens, _), (tokens_after, _) = stated[1:3]
    if keeps_work:  # it is still to be contributed
        assert tokens_after >= tokens
    else:  # what was done since the commit went with it
        assert tokens_after <= len(after) * 128
        assert all(np.all(after[0][part] == 0.25) for part in where)


def test_a_commit_that_makes_the_loss_nan_is_voted_against_before_the_peer_gives_up(make: Make) -> None:
    """Steps without a finite loss are no work, so no round would fall due; the peers call one at once."""
    peer = make({"round": {"inner_steps": 2}}, max_rounds=3)
    said, hold, compute = list[bool | None](), peer.network.run_round, peer.trainer._steps.gradients.compute
    ruined_rounds = {2}

    async def note(tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None) -> Any:
        said.append(loss_rose)
        return await hold(tokens, routed, leaving, loss_rose)

    def take_back(network: StubNetwork) -> RoundReport:
        network.reference.finish(3, [(0, 3)])
        commit = CommitReport(3, ("me", "other"), 0, 0, (0,), 8, taken_back=2)
        return RoundReport(commit, 0.0, 0.0, network.reference.digest.hex(), ExpertChange(network.held), 0)

    def compute_or_fail(batch_BS: NDArray[np.int64], progress: float) -> float:
        loss = compute(batch_BS, progress=progress)
        return float("nan") if peer.trainer.round in ruined_rounds else loss

    peer.network.run_round = note  # type: ignore[method-assign, assignment]
    peer.trainer._steps.gradients.compute = compute_or_fail  # type: ignore[method-assign]
    peer.network.answers = [StubNetwork.commit, StubNetwork.commit, take_back]
    peer.trainer.run()
    assert said[2] is True
    assert [event.get("taken_back") for event in peer.events("round")] == [None, None, 2, None]
    assert peer.trainer.round == 4
