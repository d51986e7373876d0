"""Signed statements, and the groups that they form."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from pydantic import ValidationError

from spes_swarm.protocol.consensus.lineage import MARK_BYTES
from spes_swarm.protocol.rounds.statement import Group, Statement, form_group, open_statement
from spes_swarm.protocol.rounds.vouchers import MAX_VOUCHED, VOUCHER_BYTES
from tests.helpers.refusals import refused
from tests.helpers.rounds import identity, sign_statement

RUN = "run-1"
NUM_BLOCKS = 5


def statement(**changes: Any) -> Statement:
    fields: dict[str, Any] = {
        "round": 3,
        "held": [0, 2],
        "tokens": 100,
        "routed": [10, 20],
        "rms": [0.01, 0.02, 0.03],
        "usual_rms": [0.0, 0.0],
        "vouched": b"",
        "bandwidth_mbps": 50.0,
        "reachable": True,
        "versions": [0] * NUM_BLOCKS,
        "digests": [b"\1" * 32] * NUM_BLOCKS,
        "commits": [1, 2],
        "marks": b"\1" * 2 * MARK_BYTES,
        "room": 2,
        "fixed": False,
        "leaving": False,
        "leased": b"\0",
        "certificate": b"",
    }
    return Statement(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"held": [2, 0]},
        {"held": [2, 2]},
        {"held": [0, 4]},  # there are four experts: 0 to 3
        {"held": [-1, 2]},
        {"routed": [10]},
        {"routed": [10, -1]},
        {"tokens": -1},
        {"tokens": 1 << 49},
        {"rms": [0.01, 0.02]},
        {"rms": [0.01, 0.02, -0.01]},
        {"rms": [0.01, 0.02, float("nan")]},
        {"rms": [1e31, 0.02, 0.03]},
        {"usual_rms": [0.01]},
        {"usual_rms": [0.01, float("inf")]},
        {"vouched": bytes(VOUCHER_BYTES - 1)},
        {"vouched": bytes(VOUCHER_BYTES * (MAX_VOUCHED + 1))},
        {"bandwidth_mbps": 0.0},
        {"bandwidth_mbps": float("nan")},
        {"bandwidth_mbps": float("inf")},
        {"versions": [0] * 4},
        {"versions": [-1] * NUM_BLOCKS},
        {"digests": [b"\1" * 31] * NUM_BLOCKS},
        {"digests": [b"\1" * 32] * 2, "versions": [0] * 2},
        {"round": -1},
        {"reachable": 1},
        {"commits": [2, 1]},
        {"commits": [1, 3]},
        {"commits": [1]},
        {"marks": b""},
        {"leased": b""},
        {"loss_rose": 1},
        {"before": b"\1" * 31},
        {"before": b"\1" * 33},
    ],
    ids=repr,
)
def test_a_statement_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        statement(**changes)


def test_a_statement_is_for_one_run_round_and_model() -> None:
    data = sign_statement(identity(0), RUN, statement())
    member = open_statement(data, RUN, 3, NUM_BLOCKS)
    assert (member.peer_id, member.statement.tokens) == (identity(0).peer_id, statement().tokens)
    refused("signature", lambda: open_statement(data, "run-2", 3, NUM_BLOCKS))
    refused("round", lambda: open_statement(data, RUN, 4, NUM_BLOCKS))
    refused("shape", lambda: open_statement(data, RUN, 3, NUM_BLOCKS + 1))


@pytest.mark.slow
def test_a_group_is_the_same_in_whatever_order_it_was_gathered() -> None:
    gathered = [sign_statement(identity(i), RUN, statement(tokens=i)) for i in range(3)]
    groups = [form_group(RUN, 3, order, NUM_BLOCKS) for order in permutations(gathered)]
    assert len({group.id for group in groups}) == 1
    for group in groups:
        assert [m.peer_id for m in group.members] == sorted(identity(i).peer_id for i in range(3))
        assert [group.index_of(m.peer_id) for m in group.members] == [0, 1, 2]
        assert group.index_of(identity(3).peer_id) is None


def test_every_group_has_a_name_of_its_own() -> None:
    one, two, other = (sign_statement(identity(i), RUN, statement(tokens=t)) for i, t in ((0, 1), (1, 1), (1, 2)))
    ids = [form_group(RUN, 3, gathered, NUM_BLOCKS).id for gathered in ([one], [two], [one, two], [one, other])]
    assert len(set(ids)) == 4


def test_a_peer_is_in_a_group_once() -> None:
    gathered = [sign_statement(identity(0), RUN, statement(tokens=t)) for t in (1, 2)]
    refused("duplicate", lambda: form_group(RUN, 3, gathered, NUM_BLOCKS))


def test_the_id_of_a_group_is_part_of_neither_its_value_nor_a_changed_copy() -> None:
    group = form_group(RUN, 3, [sign_statement(identity(i), RUN, statement()) for i in range(2)], NUM_BLOCKS)
    own_id = group.id
    assert group == Group(RUN, 3, group.members, group.sealed)
    assert pickle.loads(pickle.dumps(group)) == group
    assert pickle.loads(pickle.dumps(group)).id == own_id
    changed = replace(group, sealed=group.sealed[1:])
    assert changed != group
    assert changed.id == Group(RUN, 3, group.members, group.sealed[1:]).id != own_id
