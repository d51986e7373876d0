"""The reference's digests, computed here from the bytes themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import (
    CHUNK_ELEMENTS,
    Reference,
    ReferenceTable,
    block_digest,
    chunk_digest,
    chunks_of,
    whole_digest,
)
from tests.helpers.rounds import small_layout

CHUNK_BYTES = 4 * CHUNK_ELEMENTS


def layout_with_shared(size: int) -> Layout:
    return Layout.build({"embed": (size,)}, {"up": (2, 5)})


def digest_of_bytes(data: bytes) -> bytes:
    """As documented: the hash of the hashes of 1 MiB chunks."""
    pieces = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    return blake3(b"".join(blake3(piece).digest() for piece in pieces)).digest()


def reference(layout: Layout, seed: int = 0) -> Reference:
    return Reference(layout, np.random.default_rng(seed).normal(size=layout.num_elements).astype(np.float32))


@pytest.mark.parametrize("size", [1, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS])
def test_chunks_cover_a_block_in_order_and_digests_are_of_its_bytes(size: int) -> None:
    layout = layout_with_shared(size)
    block = layout.blocks[0]
    chunks = chunks_of(block)
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert [i for c in chunks for i in (c.start, c.start + c.size)][1:-1:2] == [c.start for c in chunks[1:]]
    assert (chunks[0].start, sum(c.size for c in chunks)) == (0, size)
    assert all(c.size == CHUNK_ELEMENTS for c in chunks[:-1])
    ours = reference(layout)
    assert ours.digests[0] == digest_of_bytes(ours.values_N[:size].tobytes())


def test_every_block_has_the_digest_of_its_bytes_and_the_whole_that_of_all() -> None:
    layout = small_layout(3)
    ours = reference(layout)
    hasher = blake3()
    for block, digest in zip(layout.blocks, ours.digests, strict=True):
        expected = digest_of_bytes(ours.values_N[block.start : block.stop].tobytes())
        assert digest == expected
        hasher.update((0).to_bytes(8, "little") + expected)
    assert ours.digest == hasher.digest()


def test_a_digest_does_not_depend_on_where_the_values_lie_in_memory() -> None:
    values_N = np.arange(7, dtype=np.float32)
    offset_N = np.arange(8, dtype=np.float32)[1:] - 1
    assert chunk_digest(values_N) == chunk_digest(offset_N) == chunk_digest(values_N.astype("<f4"))
    assert chunk_digest(values_N) == blake3(bytes(values_N.tobytes())).digest()


def test_digests_tell_values_apart_by_their_bits() -> None:
    zero_N = np.zeros(4, np.float32)
    assert chunk_digest(zero_N) != chunk_digest(-zero_N)


@given(st.integers(0, 3), st.integers(0, 2**31), st.integers(1, 1000))
def test_finish_changes_exactly_what_it_is_told(index: int, element: int, version: int) -> None:
    layout = small_layout(3, shared=20, expert=9)
    ours = reference(layout)
    block = layout.blocks[index]
    before = ours.table
    ours.values_N[block.start + element % block.size] += 1.0
    assert ours.table == before  # a change of values alone changes nothing that others are told
    ours.finish(version, [(index, version)])
    fresh = Reference(layout, ours.values_N)
    assert ours.digests == fresh.digests
    assert ours.round == version
    assert ours.versions == tuple(version if i == index else 0 for i in range(4))
    assert [a != b for a, b in zip(ours.digests, before.digests, strict=True)] == [i == index for i in range(4)]
    assert ours.digest == whole_digest(ours.versions, fresh.digests) != before.digest


def test_equal_values_of_another_version_are_another_reference() -> None:
    ours, theirs = reference(small_layout(2)), reference(small_layout(2))
    theirs.finish(1, [(0, 1)])
    assert ours.digests == theirs.digests
    assert ours.digest != theirs.digest


def test_versions_and_digests_must_fit_together() -> None:
    with pytest.raises(ValueError, match="shorter"):
        whole_digest([1, 2], [b"\0" * 32])


def test_a_table_is_a_snapshot() -> None:
    ours = reference(small_layout(2))
    table = ours.table
    digest = table.digest
    ours.values_N += 1.0
    ours.finish(1, [(i, 1) for i in range(3)])
    assert table.digest == digest != ours.table.digest
    assert ours.table.digests == ours.digests
    assert ours.table.digest == ours.digest
    assert [block_digest(chunks) for chunks in ours.table.chunk_digests] == list(ours.digests)


def test_a_table_of_another_model_is_refused() -> None:
    layout = layout_with_shared(2 * CHUNK_ELEMENTS)
    table = Reference(layout, np.zeros(layout.num_elements, np.float32)).table
    table.check_shape(layout)
    first, *others = table.chunk_digests
    wrong: list[ReferenceTable] = [
        dataclasses.replace(table, versions=table.versions[1:]),
        dataclasses.replace(table, chunk_digests=table.chunk_digests[1:]),
        dataclasses.replace(table, chunk_digests=(first[1:], *others)),
        dataclasses.replace(table, chunk_digests=((*first, first[0]), *others)),
    ]
    for bad in wrong:
        with pytest.raises(ProtocolError) as error:
            bad.check_shape(layout)
        assert error.value.kind == "shape"
