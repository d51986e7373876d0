"""Peers without signed exchanges and audits, and peers that count the CPU time of their functions, for comparisons.

An unsigned peer sends frames as they were before exchanges were signed: a contribution with nothing beside its payload,
a result with a bitmap of its contributors. A reducer adds its own difference as it is, without encoding it. It hashes,
signs and verifies nothing, makes no recipes, and audits nothing, because no result has a signature. Such peers can only
exchange with each other. What remains of signed exchanges: certificates in statements, the mean in fp64, and the lists
of culprits in records.

Shape: N elements of one part.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from scripts.testing.forked_peer import ForkServer
from spes_swarm import join
from spes_swarm.base.arrays import FloatArray
from spes_swarm.network.round import audits, claims, sync_round
from spes_swarm.protocol.averaging import agreement, commitments, recipe
from spes_swarm.protocol.averaging.clipping import FREE_DEVIATION
from spes_swarm.protocol.averaging.commitments import SIGNATURE_BYTES, Commitment, Opening, Signer, SigningKey
from spes_swarm.protocol.averaging.recipe import Recipe, mean
from spes_swarm.protocol.bitmap import members_of
from spes_swarm.protocol.consensus import codec
from spes_swarm.protocol.rounds import contributions, reducing, round_state
from spes_swarm.protocol.rounds.contributions import Contributions, Values
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Contribution, Part
from spes_swarm.protocol.rounds.reducing import Accumulator, Averaging
from spes_swarm.protocol.rounds.round_state import RoundState

PROFILE = "functions.json"  # in the output directory of a profiled peer
_NOTHING = Opening(bytes(SIGNATURE_BYTES), ())
_NOBODY = Commitment(b"", b"")
_AUDITS = "audits: "  # what these call counts as theirs


def launch(namespace: str, *, signed: bool, profiled: bool) -> ForkServer:
    """Starts peers in a namespace."""
    return ForkServer(namespace, main=partial(_main, signed, profiled))


class _Unsigned(RoundState):
    def push_frame(self, part: Part) -> Frame:
        if part.reducer != self.me:
            return super().push_frame(part)
        own = self._contribution(part, self.me)
        assert own is not None
        return Frame(FrameKind.DATA, own.form, part.index, own.weight)

    def _take(self, part: Part, contribution: Contribution, frame: Frame) -> None:
        if contribution.member != self.me:
            super()._take(part, contribution, frame)
            return
        difference_N = self.own_difference(part)
        if contribution.scale < 1:
            difference_N = difference_N * np.float32(contribution.scale)
        self._accumulators[part.index].add(contribution, _NOBODY, difference_N)

    def _mean(self, part: Part, accumulator: Accumulator) -> FloatArray:
        members, block_plan = sorted(accumulator.differences), self.plan.block_of(part)
        free_rms = FREE_DEVIATION * block_plan.median_rms if self.bounds.bounded else math.inf
        differences = [accumulator.differences[member] for member in members]
        weights = [accumulator.weights[member] for member in members]
        mean_N, agreement = mean(differences, weights, free_rms, block_plan.stretch)
        if self.bounds.bounded:
            self.agreements.note(part, members, agreement)
        return mean_N

    def _sign_results(self) -> None:
        self._unsigned.clear()

    def _check_signed(self, *result: Any) -> Any:
        return None


class _NoOpening:
    from_wire = staticmethod(lambda data: _NOTHING)


def _batch_of_one(self: Contributions, part: Part, values: Values) -> dict[int, Frame]:
    own = next(c for c in self.plan.block_of(part).contributions if c.member == self.me)
    payload = self._encode(part, own, values)
    return {part.index: Frame(FrameKind.DATA, own.form, part.index, own.weight, b"", payload)}


def _decode(data: bytes, num_members: int, known: list[Commitment]) -> tuple[frozenset[int], Opening, tuple[()]]:
    return frozenset(members_of(data, num_members)), _NOTHING, ()


@contextmanager
def unsigned() -> Iterator[type[RoundState]]:
    """Has this process neither sign nor audit; yields the class of its rounds."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (sync_round, "RoundState", _Unsigned),
            (Contributions, "batch", _batch_of_one),
            (round_state, "contribution_leaf", lambda part, payload: b""),
            (round_state, "Opening", _NoOpening),
            (round_state, "decode", _decode),
            (Signer, "commitment", lambda *content: _NOBODY),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield _Unsigned


class FunctionClock:
    """The CPU seconds of functions of a network process, without those of timed functions that they call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._threads = threading.local()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time counted under a name."""

        def call(*args: Any, **options: Any) -> Any:
            stack: list[float] = self._threads.__dict__.setdefault("stack", [])  # seconds of what each has called
            in_audit = self._threads.__dict__.get("in_audit", False)
            if in_audit:
                return function(*args, **options)
            self._threads.in_audit = name.startswith(_AUDITS)
            stack.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                total, inner = time.thread_time() - begun, stack.pop()
                self._seconds[name] += total - inner
                self._calls[name] += 1
                self._threads.in_audit = False
                if stack:
                    stack[-1] += total

        return call

    def write(self) -> None:
        """Writes the seconds and calls so far."""
        content = {name: [seconds, self._calls[name]] for name, seconds in sorted(self._seconds.items())}
        self._path.write_text(json.dumps(content), encoding="utf-8")


def _main(signed: bool, profiled: bool, arguments: list[str]) -> int:
    with ExitStack() as stack:
        if not signed:
            stack.enter_context(unsigned())
        if profiled:
            _measure(stack, FunctionClock(Path(arguments[arguments.index("--output-dir") + 1], PROFILE)))
        return join.main(arguments)


def _measure(stack: ExitStack, clock: FunctionClock) -> None:
    state: type[RoundState] = sync_round.__dict__["RoundState"]  # the patched one
    for name, owner, attribute in (
        ("codec: encode", codec.BlockInteger, "encode"),
        ("codec: decode", codec.BlockInteger, "decode"),
        ("mean: Gram matrix", agreement, "_gram"),
        ("mean: sum", recipe, "_combined"),
        ("mean: rest", state, "_mean"),
        ("checks of lengths", state, "_check_norm"),
        ("signing", SigningKey, "commit"),
        ("verifying: Ed25519", commitments, "_is_signed"),
        ("verifying: rest", Signer, "commitment"),
        ("digests of contributions", round_state, "contribution_leaf"),
        ("digests of contributions", contributions, "contribution_leaf"),
        ("heads of results", round_state, "head_of"),
        ("heads of results", reducing, "head_of"),
        ("recipes", Averaging, "recipe"),
        ("extras of results", round_state, "encode"),
        ("extras of results", round_state, "decode"),
        ("round: accept", state, "accept"),
        ("round: store_result", state, "store_result"),
        ("round: push_frame", state, "push_frame"),
        ("round: result_frame", state, "result_frame"),
        ("round: commit", state, "commit"),
        (_AUDITS + "contributions made again", audits, "own_contribution"),
        (_AUDITS + "reducers' work repeated", claims, "judge"),
        (_AUDITS + "contributions taken in", audits.Audits, "_take"),
        (_AUDITS + "quotes checked", claims.Claim, "false_quote"),
    ):
        function = owner.__dict__.get(attribute, None) or getattr(owner, attribute)
        stack.enter_context(patch.object(owner, attribute, clock.timed(name, function)))
    digest = Recipe.__dict__["digest"].fget
    stack.enter_context(patch.object(Recipe, "digest", property(clock.timed("digests of recipes", digest))))
    end = audits.Audits.end

    def write_and_end(self: audits.Audits, *, keep: bool) -> None:
        clock.write()  # once a round
        end(self, keep=keep)

    stack.enter_context(patch.object(audits.Audits, "end", write_and_end))
