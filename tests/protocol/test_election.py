"""Who publishes: every peer must come to the same line from the same records, and no dead one may block it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.members.election import line_of, periods_to_wait, target_digest
from spes_swarm.protocol.members.records import Volunteer

HERE, ELSEWHERE = target_digest("run-1", "user/model"), target_digest("run-1", "user/other")
peers = st.sets(st.sampled_from([f"peer{n}" for n in range(12)]), min_size=1)


def volunteers(names: Collection[str], publishing: Collection[str] = ()) -> dict[str, Volunteer]:
    return {name: Volunteer(expires=9.0, target=HERE, publishing=name in publishing) for name in names}


def test_a_target_is_named_without_being_told() -> None:
    assert HERE != ELSEWHERE != target_digest("run-2", "user/other")
    assert b"user" not in HERE
    assert len(HERE) == 16


@given(peers)
def test_exactly_one_is_first_whoever_looks(names: set[str]) -> None:
    known = volunteers(names)
    waits = {name: periods_to_wait(known, HERE, name) for name in names}
    assert sorted(waits.values()) == list(range(len(names)))
    assert [name for name, _ in sorted(waits.items(), key=lambda item: item[1])] == line_of(known, HERE)


@given(peers, st.data())
def test_when_the_first_is_gone_the_next_one_is_first(names: set[str], data: st.DataObject) -> None:
    known = volunteers(names)
    line = line_of(known, HERE)
    gone = data.draw(st.sampled_from(line))
    del known[gone]
    assert line_of(known, HERE) == [name for name in line if name != gone]


@pytest.mark.slow
@given(peers, st.data())
def test_who_is_at_it_is_given_time_but_not_for_ever(names: set[str], data: st.DataObject) -> None:
    busy = data.draw(st.sampled_from(sorted(names)))
    known = volunteers(names, {busy})
    assert line_of(known, HERE)[0] == busy
    assert periods_to_wait(known, HERE, busy) == 0
    others = sorted(periods_to_wait(known, HERE, name) for name in names - {busy})
    assert others == [3 + n for n in range(len(others))]


@given(peers)
def test_who_publishes_elsewhere_is_in_no_ones_way(names: set[str]) -> None:
    known = {name: Volunteer(expires=9.0, target=ELSEWHERE, publishing=True) for name in names}
    assert periods_to_wait(known, HERE, "me") == 0
    assert line_of(known, HERE) == []


def test_a_peer_whose_own_record_is_not_out_yet_takes_its_place() -> None:
    known = volunteers({f"peer{n}" for n in range(5)})
    line = line_of({**known, "me": Volunteer(expires=1.0, target=HERE, publishing=False)}, HERE)
    assert periods_to_wait(known, HERE, "me") == line.index("me")
