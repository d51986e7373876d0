"""Decides when a round is due: when the live peers together have done their inner steps since the last commit.

Fast peers have then done more steps and slow peers fewer; no peer waits for a straggler. All peers decide alike: after
each step, a peer predicts from the others' last answers what they have done by now, and begins the round if that is
nearer to the inner steps than another step of all would be. So peers come to a round at the same time, and none takes
a step more while it is being called.

The counts and speeds of other peers are unverified claims. So that no minority can call rounds at will, or delay them,
the median peer sets the bounds: no round is due before it has done an eighth of its inner steps, and one is due at the
latest when it has done five quarters. Both count finished steps as they were answered.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from statistics import median

from spes_swarm.config.run import RoundConfig
from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import SwarmView, TokenCounts

_MIN_COUNT_INTERVAL_S = 0.03
_LOOK_AGAIN_S = 0.2
_ASK_SHARE = 0.6  # of the round, by records: from then on the others are asked
_ASK_AGAIN_SHARE = 0.7  # of the time that is left until the round is due, as it seems
_ASK_AHEAD_STEPS = 1.5  # at the latest: so the answers are there, and hardly older than a step, when a round is due
_MAX_PREDICTED_STEPS = 1.0  # of each other peer, from one answer: it may have been interrupted since
_MIN_MEDIAN_SHARE, _MAX_MEDIAN_SHARE = 0.125, 1.25  # of its inner steps, done by the median peer


def others_train(network: Port, until: float) -> bool:
    """Returns True if another peer is known to train; until that monotonic time, records are read again for it.

    Ends early if no other peer is ready to train.
    """
    view = network.view
    while view is None or view.num_training == 0:
        remaining_s = until - time.monotonic()
        if remaining_s <= 0:
            return False
        try:
            view = network.submit(Commands.view).result(remaining_s)
        except TimeoutError:
            return False
        if view.num_training == 0:
            if not view.ready:
                return False
            time.sleep(min(_LOOK_AGAIN_S, remaining_s))
    return True


def wait_until_none_trains(network: Port, limit_s: float, stop: threading.Event) -> None:
    """Returns when no other peer is known to train, `stop` is set or `limit_s` have passed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not stop.wait(_LOOK_AGAIN_S):
        view = network.view
        if view is not None and view.num_training == 0:
            return


class Pace:
    """Counts the swarm's tokens since the last commit."""

    def __init__(self, network: Port, config: RoundConfig, tokens_per_step: int) -> None:
        self._network = network
        self._config = config
        self._tokens_per_step = tokens_per_step
        self.inner_steps = config.inner_steps  # of the next round
        self._count: Future[TokenCounts] | None = None  # pending: the token counts of the other peers
        self._count_at = 0.0  # monotonic time from which on they are asked again
        self._asked_at = 0.0
        self._known: TokenCounts | None = None  # the last answers
        self.progress = 0.0  # of the current round, 0 to 1, as of the last call of `due`

    def begin(self) -> None:
        """Discards the counts when a round begins: they do not apply to the next one."""
        self._count, self._known, self._count_at = None, None, 0.0

    def due(self, tokens: int, tokens_per_second: float) -> bool:
        """Returns True if a round is due, given this peer's tokens since the last commit, and per second."""
        inner_steps, view = self.inner_steps, self._network.view
        own = inner_steps * self._tokens_per_step
        if view is not None and view.out is not None:
            return True  # it gets no more counts; the next round says why and ends the session
        if view is None or view.num_training == 0:
            self.progress = min(1.0, tokens / own)
            return tokens >= own
        now = time.monotonic()
        wanted = own + inner_steps * view.tokens_per_step
        estimate = tokens + view.tokens + view.tokens_per_second * min(now - view.at, self._config.progress_ttl_s)
        self.progress = min(1.0, estimate / wanted)
        # Records are seconds old and speeds vary, so the other peers are asked directly before a round is called.
        if self._count is not None and self._count.done():
            self._known, self._count = self._count.result(), None
            if self._known.called:
                return True
            missing = wanted - self._done(tokens, view, now)
            missing_s = missing / (self._known.tokens_per_second + tokens_per_second + 1.0)
            ahead_s = missing_s - _ASK_AHEAD_STEPS * self._tokens_per_step / (tokens_per_second + 1.0)
            # Ask again after another quarter of this peer's inner steps at the latest: the median may make the round
            # due before the sum does.
            later_s = min(_ASK_AGAIN_SHARE * missing_s, ahead_s, _ASK_AGAIN_SHARE * own / 4 / (tokens_per_second + 1.0))
            self._count_at = max(self._asked_at + _MIN_COUNT_INTERVAL_S, now + later_s)
        all_steps = self._tokens_per_step + view.tokens_per_step
        near = wanted - _ASK_AHEAD_STEPS * all_steps  # decides if H is less than 4
        may_be_due = estimate >= min(_ASK_SHARE * wanted, near) or tokens >= _MAX_MEDIAN_SHARE * own
        if self._count is None and may_be_due and now >= self._count_at:
            self._count, self._asked_at = self._network.submit(Commands.count_tokens), now
        if self._known is None:
            return False
        # A round ends between two steps; the nearest such moment is at most half a step of each peer away.
        enough = self._done(tokens, view, now) >= wanted - all_steps / 2
        counted = self._counted(tokens)
        median_steps = median([counted / self._tokens_per_step, *(steps + 1 for steps in self._known.steps)])
        if median_steps >= _MAX_MEDIAN_SHARE * inner_steps:
            return True
        return enough and median_steps >= _MIN_MEDIAN_SHARE * inner_steps

    def _counted(self, tokens: int) -> int:
        """Returns those of this peer's tokens that belong to the round.

        If it is behind, part of its work belongs to rounds that the others have run without it.
        """
        assert self._known is not None
        return min(tokens, self.inner_steps * self._tokens_per_step) if self._known.behind else tokens

    def _done(self, tokens: int, view: SwarmView, now: float) -> float:
        """Predicts what all peers have done by now."""
        known = self._known
        assert known is not None
        since = known.tokens_per_second * max(0.0, now - known.at)
        most = _MAX_PREDICTED_STEPS * view.tokens_per_step
        return self._counted(tokens) + known.tokens + known.begun + min(since, most)
