"""Decides when a round is due: when the live peers together have done their inner steps since the last commit.

Fast peers have then done more steps and slow peers fewer; no peer waits for a straggler. The counts of other peers are
unverified claims. So that no minority can call rounds at will, or delay them, the median peer sets the bounds: no round
is due before it has done an eighth of its inner steps, and one is due at the latest when it has done five quarters.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from statistics import median

from spes_swarm.config.run import RoundConfig
from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import TokenCounts

_MIN_COUNT_INTERVAL_S = 0.1
_MIN_MEDIAN_SHARE, _MAX_MEDIAN_SHARE = 0.125, 1.25  # of its inner steps, done by the median peer


class Pace:
    """Counts the swarm's tokens since the last commit."""

    def __init__(self, network: Port, config: RoundConfig, tokens_per_step: int) -> None:
        self._network = network
        self._config = config
        self._tokens_per_step = tokens_per_step
        self.inner_steps = config.inner_steps  # of the next round
        self._count: Future[TokenCounts] | None = None  # pending: the token counts of the other peers
        self._count_at = 0.0
        self.progress = 0.0  # of the current round, 0 to 1, as of the last call of `due`

    def begin(self) -> None:
        """Discards the counts when a round begins: they do not apply to the next one."""
        self._count, self._count_at = None, 0.0

    def due(self, tokens: int, tokens_per_second: float) -> bool:
        """Returns True if a round is due, given this peer's tokens since the last commit, and per second."""
        inner_steps, view = self.inner_steps, self._network.view
        own = inner_steps * self._tokens_per_step
        if view is None or view.num_training == 0:
            self.progress = min(1.0, tokens / own)
            return tokens >= own
        now = time.monotonic()
        wanted = own + inner_steps * view.tokens_per_step
        estimate = tokens + view.tokens + view.tokens_per_second * min(now - view.at, self._config.progress_ttl_s)
        self.progress = min(1.0, estimate / wanted)
        # Records are seconds old and speeds vary, so the other peers are asked directly before a round is called.
        if self._count is not None and self._count.done():
            counts, self._count = self._count.result(), None
            if counts.called:
                return True
            # If this peer is behind, part of its work belongs to rounds that the others have run without it.
            counted = min(tokens, own) if counts.behind else tokens
            # Each other peer is in the middle of a step, which it finishes before it joins the round.
            done = counted + counts.tokens + view.tokens_per_step
            median_steps = median([counted / self._tokens_per_step, *(steps + 1 for steps in counts.steps)])
            missing_s = (wanted - done) / (view.tokens_per_second + tokens_per_second + 1.0)
            # Ask again after another quarter of this peer's inner steps at the latest: the median may make the round
            # due before the sum does.
            missing_s = min(missing_s, own / 4 / (tokens_per_second + 1.0))
            self._count_at = now + max(_MIN_COUNT_INTERVAL_S, 0.7 * missing_s)
            enough = done >= wanted and median_steps >= _MIN_MEDIAN_SHARE * inner_steps
            return enough or median_steps >= _MAX_MEDIAN_SHARE * inner_steps
        may_be_due = estimate >= wanted or tokens >= _MAX_MEDIAN_SHARE * own
        if self._count is None and may_be_due and now >= self._count_at:
            self._count = self._network.submit(Commands.count_tokens)
        return False
