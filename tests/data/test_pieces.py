"""Owners of pieces: one each, as few moves as possible, and positions that preserve the order."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.data.streaming.pieces import BLOCK_EXAMPLES, MANY_UNITS, Deal, Piece

MEMBERS = st.sets(st.text("abcdefgh", min_size=1, max_size=4), min_size=1, max_size=8)
SEEDS = st.integers(0, 2**63 - 1)
UNITS = st.integers(1, 3 * MANY_UNITS)


def some_pieces(deal: Deal) -> list[Piece]:
    blocks = range(3) if deal.in_blocks else range(1)
    return [Piece(*item) for item in product(range(2), range(min(deal.num_units, 12)), blocks)]


@given(seed=SEEDS, num_units=UNITS, members=MEMBERS)
def test_every_piece_has_one_owner_whatever_the_order_of_the_members(
    seed: int, num_units: int, members: set[str]
) -> None:
    deal, other = Deal(seed, num_units, 0.1), Deal(seed, num_units, 0.1)
    for piece in some_pieces(deal):
        owner = deal.owner(piece, sorted(members))
        assert owner in members
        assert owner == other.owner(piece, sorted(members, reverse=True))


@given(seed=SEEDS, num_units=UNITS, members=MEMBERS, newcomer=st.text("xyz", min_size=1, max_size=3))
def test_only_the_pieces_of_members_that_join_or_leave_move(
    seed: int, num_units: int, members: set[str], newcomer: str
) -> None:
    deal = Deal(seed, num_units, 0.1)
    for piece in some_pieces(deal):
        before, after = deal.owner(piece, members), deal.owner(piece, {*members, newcomer})
        assert after in (before, newcomer)


def test_the_shares_are_about_equal_and_change_from_epoch_to_epoch() -> None:
    deal, members = Deal(7, 1000, 0.1), ["a", "b", "c", "d"]
    owners = [[deal.owner(Piece(epoch, place, 0), members) for place in range(1000)] for epoch in range(2)]
    for of_epoch in owners:
        # Four standard deviations of a binomial share.
        assert all(abs(count - 250) < 4 * (1000 * 0.25 * 0.75) ** 0.5 for count in Counter(of_epoch).values())
    by_unit = [{deal.unit(epoch, place): owners[epoch][place] for place in range(1000)} for epoch in range(2)]
    moved = sum(by_unit[0][unit] != by_unit[1][unit] for unit in range(1000))
    assert 650 < moved < 850


@given(seed=SEEDS, num_units=UNITS, epoch=st.integers(0, 100))
def test_an_epoch_has_every_unit_once(seed: int, num_units: int, epoch: int) -> None:
    deal = Deal(seed, num_units, 0.1)
    assert sorted(deal.unit(epoch, place) for place in range(num_units)) == list(range(num_units))


@given(num_units=UNITS, data=st.data())
def test_a_position_is_the_first_place_that_has_not_been_begun(num_units: int, data: st.DataObject) -> None:
    deal = Deal(0, num_units, 0.1)
    block = st.integers(0, 5000) if deal.in_blocks else st.just(0)
    pieces = st.builds(Piece, st.integers(0, 10_000), st.integers(0, num_units - 1), block)
    piece, other = data.draw(pieces), data.draw(pieces)
    coming, begun = deal.position(piece, begun=False), deal.position(piece, begun=True)
    assert deal.place_of(coming) == (piece.epoch, piece.place, piece.block * BLOCK_EXAMPLES)
    following = deal.place_of(begun)
    assert following > (piece.epoch, piece.place, piece.block * BLOCK_EXAMPLES)
    assert coming < begun < 2**62
    # What was begun is before the position, and nothing else is skipped.
    if piece < other:
        assert following <= (other.epoch, other.place, other.block * BLOCK_EXAMPLES)
        assert begun <= deal.position(other, begun=False)


def test_the_start_is_position_0_and_an_absurd_claim_is_a_valid_place() -> None:
    for num_units in (1, MANY_UNITS):
        deal = Deal(0, num_units, 0.1)
        assert deal.position(Piece(0, 0, 0), begun=False) == 0
        assert deal.place_of(0) == (0, 0, 0)
        assert deal.position(Piece(2**61, 0, 0), begun=True) < 2**62
        epoch, place, example = deal.place_of(2**62 - 1)
        assert place < num_units
        assert min(epoch, place, example) >= 0


def test_the_held_out_share_is_the_runs_and_the_same_for_all() -> None:
    deal, same, none = Deal(3, 5, 0.02), Deal(3, 5, 0.02), Deal(3, 5, 0.0)
    chosen = [number for number in range(50_000) if deal.is_held_out(2, 0, number)]
    assert abs(len(chosen) - 1000) < 4 * (50_000 * 0.02 * 0.98) ** 0.5
    assert chosen[:10] == [number for number in range(chosen[9] + 1) if same.is_held_out(2, 0, number)]
    assert not any(none.is_held_out(2, 0, number) for number in range(1000))
