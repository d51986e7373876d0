"""What donors say that they have: absurd tables are refused, and of the others most decide."""

from __future__ import annotations

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.transfer.donors import choose_table, table_from_wire, table_to_wire
from spes_swarm.protocol.consensus.reference import Reference, ReferenceTable
from tests.helpers.rounds import small_layout


def table(round_number: int, seed: int = 0) -> ReferenceTable:
    digests = tuple((bytes([seed, block]) * 16,) for block in range(4))
    return ReferenceTable(round_number, (round_number,) * 4, digests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "expected", "sure"),
    [
        ([table(5)], table(5), True),
        ([table(5), table(5), table(6)], table(5), True),
        ([table(5), table(6), table(6)], table(6), True),
        ([table(5), table(6)], table(6), False),
        ([table(5), table(5), table(5, 1)], table(5), True),
        ([table(5), table(6), table(2**39, 1)], table(6), False),  # a lone claim of a far round
        ([table(5), table(5), table(6), table(6), table(2**39, 1)], table(6), False),
        ([table(4), table(5), table(6)], table(5), False),
    ],
)
def test_most_donors_decide(tables: list[ReferenceTable], expected: ReferenceTable, sure: bool) -> None:
    for order in (tables, tables[::-1]):
        assert choose_table(order) == (expected, sure)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 2**63},
        {"round": True},
        {"round": -1},
        {"round": "1"},
        {"versions": [0]},
        {"versions": [2**63] * 5},
        {"versions": [True] * 5},
        {"chunks": []},
        {"chunks": [b"\0" * 33] * 5},
        {"chunks": [b"\0" * 32 * 10_000] * 5},
        {"chunks": None},
    ],
)
def test_absurd_tables_are_refused(change: dict[str, object]) -> None:
    layout = small_layout(4)
    wire = table_to_wire(Reference(layout, np.zeros(layout.num_elements, np.float32)).table)
    table_from_wire(wire, layout)
    with pytest.raises(ProtocolError):
        table_from_wire({**wire, **change}, layout)
