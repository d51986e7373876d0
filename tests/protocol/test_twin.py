"""Two processes with one identity, seen by one of them."""

from __future__ import annotations

from spes_swarm.protocol.members.twin import TwinWatch

TTL_S = 30.0


def watch(begun_at: float = 1000.0) -> TwinWatch:
    twins = TwinWatch(TTL_S)
    twins.wrote(begun_at + TTL_S, now=begun_at)
    return twins


def test_own_records_are_no_twin() -> None:
    twins = watch()
    for now in range(1001, 1200):
        twins.wrote(now + TTL_S, now)
        assert not twins.read(now + TTL_S, now)


def test_two_new_records_of_somebody_else_are_a_twin() -> None:
    twins = watch()
    assert not twins.read(1040.5, now=1010.5)  # the first
    assert not twins.read(1040.5, now=1011.5)  # still the same one
    assert twins.read(1046.5, now=1016.5)
    assert not twins.read(1052.5, now=1022.5)  # it has just been said
    assert twins.read(1100.5, now=1077.5)


def test_an_earlier_session_is_no_twin() -> None:
    """Nodes return different records of it, even some that it seems to have written as this session began."""
    twins = watch()
    for expires in (1010.0, 1020.0, 1029.9, 1032.0):
        assert not twins.read(expires, now=1001.0)


def test_records_that_come_in_another_order_are_no_twin() -> None:
    twins = watch()
    assert not twins.read(1046.5, now=1016.5)
    assert not twins.read(1040.5, now=1017.5)
    assert not twins.read(1046.5, now=1018.5)


def test_nobody_is_a_twin_before_this_peer_has_written() -> None:
    twins = TwinWatch(TTL_S)
    assert not twins.read(1040.0, now=1010.0)
    assert not twins.read(1050.0, now=1020.0)
