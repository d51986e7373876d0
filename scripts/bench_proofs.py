"""Measures which lies of reducers are proven, and whether anything else is accepted as a proof or as signed.

    .venv/bin/python -m scripts.bench_proofs [--quick] [--json FILE]

Makes exchanges with the real classes, in which a reducer lies, and lets `python -m spes_swarm.proof`, in a process of
its own, verify a proof of each lie. Then it verifies proofs about honest reducers, mutated proofs, and random and
mutated input of each decoder, also of admissions, statements and streams. The exit code is 1 if a lie is not proven, if
anything else is accepted as a proof, an admission or an act, or if a decoder raises anything but a ProtocolError.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import msgpack
import numpy as np
from pydantic import ValidationError

from scripts.testing.mutation import garbage, mutated
from spes_swarm.base.arguments import show_any_text
from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.decoding import first_complaint, unpack
from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.network.link.wire import read_hello
from spes_swarm.network.round.claims import read_seen
from spes_swarm.protocol.admission import acts
from spes_swarm.protocol.admission.grants import (
    Chain,
    Grant,
    Invitation,
    extend,
    new_key,
    open_admission,
    pack,
    read_invitation,
)
from spes_swarm.protocol.averaging.commitments import Opening
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.averaging.recipe import Recipe
from spes_swarm.protocol.averaging.signed_result import contribution_leaf, decode, encode
from spes_swarm.protocol.consensus.codec import CODECS, get_codec
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.statement import Statement, open_statement
from spes_swarm.protocol.version import with_version
from tests.helpers.meeting import statement_fields
from tests.helpers.rounds import identity, sign_statement
from tests.helpers.signed_exchange import EXCHANGE, Lie, Reduced, differences, hold_exchange, honest

ROOT: Final = Path(__file__).resolve().parents[1]
SIGNED: Final = {"open_proof", "open_admission", "open_act", "open_statement"}  # no change of these is accepted
Maker = Callable[[int], bytes]
"""Makes the proof of a lie from a seed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    what: str
    count: int
    accepted: int
    expected: int | None = None  # None: any number
    errors: int = 0  # that are not ProtocolErrors
    slowest_ms: float | None = None
    seconds: float

    @property
    def is_fine(self) -> bool:
        """Returns True if all is as it should be."""
        return self.errors == 0 and self.expected in (None, self.accepted)


def an_exchange(
    seed: int, lie: Lie = honest, forge: int | None = None, contributions_seed: int | None = None
) -> Reduced:
    """One part of an exchange whose size and codecs depend on the seed."""
    sizes = np.random.default_rng(seed)
    codecs = sorted(CODECS)
    made = hold_exchange(
        np.random.default_rng(seed if contributions_seed is None else contributions_seed),
        exchange=EXCHANGE._replace(round=seed),
        num_members=int(sizes.integers(3, 7)),
        num_elements=int(sizes.integers(50, 1000)),
        num_parts=int(sizes.integers(1, 9)),
        codec=codecs[sizes.integers(4)],
        result_codec=codecs[sizes.integers(4)],
        free_rms=float(sizes.choice([1e-4, np.inf])),
        lie=lie,
        forge=forge,
    )
    return made[sizes.integers(len(made))]


def _noise(mean_N: FloatArray, seed: int) -> FloatArray:
    return differences(np.random.default_rng(seed + 1), 1, len(mean_N))[0]


def _stale(mean_N: FloatArray, seed: int) -> FloatArray:
    """The mean of another round."""
    before = an_exchange(seed, contributions_seed=seed + 10_000)
    return get_codec(before.recipe.result_codec).decode(before.result, len(mean_N))


def _copied(mean_N: FloatArray, seed: int) -> FloatArray:
    """The reducer's own contribution, in place of the mean."""
    true = an_exchange(seed)
    return get_codec(true.recipe.codec).decode(true.contributions[0].payload, len(mean_N))


def _two_faced(seed: int) -> bytes:
    made = an_exchange(seed)
    other = get_codec(made.recipe.result_codec).encode(np.zeros(made.recipe.num_elements, dtype=np.float32))
    return made.two_results(made.sign_again(made.recipe.part, other))


def _misquoted(seed: int) -> bytes:
    leaves = [contribution_leaf(part, b"payload of %d" % part) for part in (1, 2, 100 + seed)]
    return an_exchange(seed).quoting(1, leaves).misquoted(1, leaves)


def _wrong(lie: Callable[[FloatArray, int], FloatArray], seed: int) -> bytes:
    return an_exchange(seed, lambda mean_N: lie(mean_N, seed)).wrong_result()


LIES: Final[dict[str, Maker]] = {
    "flipped": partial(_wrong, lambda mean_N, seed: -mean_N),
    "noise": partial(_wrong, _noise),
    "scaled": partial(_wrong, lambda mean_N, seed: mean_N * np.float32(1.1)),
    "stale": partial(_wrong, _stale),
    "copied": partial(_wrong, _copied),
    "forged": lambda seed: an_exchange(seed, forge=1).forged(1),
    "misquoted": _misquoted,
    "two-faced": _two_faced,
}


def prove_lies(count: int) -> Iterator[Row]:
    """Makes as many lies, and has the proof of each verified by the command."""
    sorts = [list(LIES)[i % len(LIES)] for i in range(count)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, f"{i}-{sort}.proof") for i, sort in enumerate(sorts)]
        for i, (path, sort) in enumerate(zip(files, sorts, strict=True)):
            path.write_bytes(LIES[sort](i))
        command = [sys.executable, "-m", "spes_swarm.proof", *map(str, files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    lines = done.stdout.splitlines()
    culprit = an_exchange(0).reducer.peer_id
    for line in lines:
        if f": peer {culprit} lied in round " not in line:
            print(line)
    seconds = (time.monotonic() - begun) / len(LIES)
    for sort in LIES:
        proven = sum(f"-{sort}.proof: peer {culprit} lied in round " in line for line in lines)
        number = sorts.count(sort)
        yield Row(what=f"lie: {sort}", count=number, accepted=proven, expected=number, seconds=seconds)


def accuse_honest(count: int) -> Row:
    """Makes each kind of proof about honest reducers."""
    begun, tried, accepted = time.monotonic(), 0, 0
    for seed in range(count):
        made = an_exchange(seed)
        claims = [made.wrong_result(), made.two_results((made.signed.head, made.signed.opening))]
        claims += [made.forged(i) for i in range(len(made.contributors))]
        tried += len(claims)
        accepted += sum(map(is_proof, claims))
    return Row(what="honest", count=tried, accepted=accepted, expected=0, seconds=time.monotonic() - begun)


def is_proof(data: bytes) -> bool:
    """Returns True if it proves anything."""
    try:
        open_proof(data)
    except ProtocolError:
        return False
    return True


def mutate_proofs(count: int, valid: Sequence[bytes]) -> Row:
    """Verifies mutated proofs; `valid` are of different exchanges."""
    random, accepted, begun = Random(1), 0, time.monotonic()
    for _ in range(count):
        accepted += is_proof(mutated(random, *random.sample(valid, 2)))
    return Row(what="mutated proofs", count=count, accepted=accepted, expected=0, seconds=time.monotonic() - begun)


def fuzz(name: str, decoder: Callable[[bytes], object], count: int, valid: Sequence[bytes]) -> Row:
    """Decodes random bytes and mutated valid messages."""
    gc.freeze()  # a collection would visit all that was imported, and count as the time of a decoder
    random, accepted, errors, slowest, begun = Random(2), 0, 0, 0.0, time.monotonic()
    for number in range(count):
        data = garbage(random) if number % 2 else mutated(random, *random.sample(valid, 2))
        start = time.thread_time()
        try:
            decoder(data)
            accepted += 1
        except ProtocolError:
            pass
        except Exception as exc:
            errors += 1
            print(f"{name}: {exc!r} for {data[:200].hex()}")
        slowest = max(slowest, time.thread_time() - start)
    return Row(
        what=f"input of {name}",
        count=count,
        accepted=accepted,
        expected=0 if name in SIGNED else None,
        errors=errors,
        slowest_ms=round(1e3 * slowest, 2),
        seconds=time.monotonic() - begun,
    )


def large_proofs() -> list[bytes]:
    """Proofs just below 64 KiB: of many contributions, and of long ones."""
    many = {"num_members": 16, "num_elements": 5000}
    long = {"num_members": 3, "num_elements": 28_000}
    return [
        hold_exchange(
            np.random.default_rng(0),
            exchange=EXCHANGE._replace(round=1000 + number),
            codec="int4",
            result_codec="int4",
            lie=lambda mean_N: -mean_N,
            **size,
        )[1].wrong_result()
        for number, size in enumerate((many, long))
    ]


def judge_large(valid: Sequence[bytes]) -> Row:
    """Measures the proofs that take longest among small ones."""
    begun, slowest, accepted = time.monotonic(), 0.0, 0
    for data in valid:
        start = time.thread_time()
        accepted += is_proof(data)
        slowest = max(slowest, time.thread_time() - start)
    what = f"proofs of {min(map(len, valid)) >> 10} to {max(map(len, valid)) >> 10} KiB"
    seconds, ms = time.monotonic() - begun, round(1e3 * slowest, 2)
    return Row(what=what, count=len(valid), accepted=accepted, expected=len(valid), slowest_ms=ms, seconds=seconds)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yields what was found, one after the other."""
    yield from prove_lies(options.lies)
    yield accuse_honest(options.lies)
    large = large_proofs()
    yield judge_large(large)
    proofs = [maker(seed) for seed, maker in enumerate([*LIES.values()] * 2)]
    yield mutate_proofs(options.mutations, proofs)
    reduced = [an_exchange(seed) for seed in range(12)]
    for name, decoder, valid in (
        *_of_admission(),
        *_of_streams(reduced),
        ("Opening.from_wire", Opening.from_wire, [each.signed.opening.wire for each in reduced]),
        ("signed_result.decode", _decode_result, [_encoded_result(each) for each in reduced]),
        ("Recipe.from_content", lambda data: Recipe.from_content(unpack(data)), [each.recipe.wire for each in reduced]),
        ("open_proof", open_proof, [*proofs, *large]),
    ):
        for message in valid:
            decoder(message)
        yield fuzz(name, decoder, options.fuzz, valid)


Decoder = tuple[str, Callable[[bytes], object], list[bytes]]
"""Its name, the function, and messages that it accepts."""


def _of_admission() -> Iterator[Decoder]:
    """What admits peers, excludes them, and says what they contribute."""
    founder, run_id, founder_key = identity(0), EXCHANGE.run_id, identity(0).public_key_der
    chains: list[tuple[Chain, bytes]] = []
    for terms in ({"may_invite": True}, {"experts": 2, "expires": 2e9}, {"uses": 1, "name": "Ada"}):
        secret, public = new_key()
        chains.append((extend(None, founder, run_id, Grant(key=public, **terms)), secret))
    secret, public = new_key()
    chains.append((extend(*chains[0], run_id, Grant(key=public)), secret))
    invitations = [Invitation(run_id, chain.wire, secret) for chain, secret in chains]
    admissions = [each.admit(founder.peer_id) for each in invitations]
    made = [
        acts.allow(extend(None, founder, run_id, Grant(peer="a peer"))),
        acts.use(founder.peer_id, admissions[2]),
        acts.revoke(founder, None, run_id, acts.Target(peer="a peer", at=1e9)),
        acts.revoke(chains[0][1], chains[0][0], run_id, acts.Target(peer="a peer", at=1e9)),
        acts.pardon(founder, run_id, acts.Pardon(peer="a peer", round=7, at=1e9)),
    ]
    statement = Statement.model_validate(statement_fields())
    statements = [sign_statement(identity(number), run_id, statement) for number in range(2)]
    yield "open_admission", lambda data: open_admission(data, founder.peer_id, run_id, founder_key), admissions
    yield "open_act", lambda data: acts.open_act(data, run_id, founder_key), made
    yield "read_invitation", _read_word, [pack([each.run_id, each.wire, each.secret]) for each in invitations]
    yield "open_statement", lambda data: open_statement(data, run_id, 5, 3), statements
    yield "a statement's content", _read_content, [pack(statement_fields() | {"tokens": number}) for number in range(2)]


def _of_streams(reduced: Sequence[Reduced]) -> Iterator[Decoder]:
    """What streams begin with, and what an audit shows."""
    hellos = [msgpack.packb(with_version(fields)) for fields in ({"group": bytes(32), "parts": b""}, {"culprit": "a"})]
    seen = []
    for each in reduced:
        opening = each.signed.opening.wire
        seen.append(bytes([len(opening)]) + opening + each.signed.head.wire + opening)
    yield "read_hello", lambda data: read_hello(Frame(FrameKind.HELLO, payload=data), len(data)), hellos
    yield "read_seen", read_seen, seen


def _read_content(data: bytes) -> object:
    try:
        return Statement.model_validate(unpack(data))
    except ValidationError as exc:
        raise ProtocolError("schema", first_complaint(exc)) from exc


def _read_word(data: bytes) -> object:
    try:
        return read_invitation("spes1." + base64.urlsafe_b64encode(data).decode().rstrip("="))
    except InvitationError as exc:
        raise ProtocolError("invitation", str(exc)) from exc


def _encoded_result(reduced: Reduced) -> bytes:
    return encode(frozenset(range(len(reduced.contributors))), 6, reduced.signed, {})


def _decode_result(data: bytes) -> object:
    return decode(data, 6, [])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lies", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=100_000, help="of proofs")
    parser.add_argument("--fuzz", type=int, default=1_000_000, metavar="INPUTS", help="of each decoder")
    parser.add_argument("--quick", action="store_true", help="few of each")
    parser.add_argument("--json", type=Path, default=Path("runs/proofs.json"), help="where the rows are written")
    options = parser.parse_args(argv)
    if options.quick:
        options.lies, options.mutations, options.fuzz = 16, 500, 500
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it."""
    show_any_text()
    options = parse_arguments(argv)
    print(f"{'':32}{'count':>10}{'accepted':>10}{'expected':>10}{'errors':>8}{'slowest':>12}{'time':>9}")
    found = []
    for row in rows(options):
        found.append(row)
        expected = "-" if row.expected is None else row.expected
        slowest = "-" if row.slowest_ms is None else f"{row.slowest_ms:.2f} ms"
        print(
            f"{row.what:32}{row.count:>10}{row.accepted:>10}{expected:>10}{row.errors:>8}{slowest:>12}"
            f"{row.seconds:>7.1f} s{'' if row.is_fine else '  WRONG'}",
            flush=True,
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.is_fine for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
