"""When a round is due: the live peers have together done their inner steps since the last commit.

A fast peer has then done more of them and a slow one fewer; nobody waits for the slowest. What the others have done is
their own word. So that no minority can call rounds at will, or put them off, the median peer decides at the edges: no
round before it has done an eighth of its inner steps, and none later than when it has done five quarters of them.
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
    """Counts the swarm's tokens since the last commit.

    Attributes:
        progress: of the present round, 0 to 1, as of the last look.
    """

    def __init__(self, network: Port, config: RoundConfig, tokens_per_step: int) -> None:
        self._network = network
        self._config = config
        self._tokens_per_step = tokens_per_step
        self._count: Future[TokenCounts] | None = None  # the others' tokens, while they are being asked
        self._count_at = 0.0
        self.progress = 0.0

    def begin(self) -> None:
        """A round begins: what was counted for it does not serve the next one."""
        self._count, self._count_at = None, 0.0

    def due(self, tokens: int, tokens_per_second: float) -> bool:
        """Returns True if a round is due.

        Args:
            tokens: that this peer has processed since the last commit.
            tokens_per_second: its speed.
        """
        inner_steps, view = self._config.inner_steps, self._network.view
        own = inner_steps * self._tokens_per_step
        if view is None or view.num_training == 0:
            self.progress = min(1.0, tokens / own)
            return tokens >= own
        now = time.monotonic()
        wanted = own + inner_steps * view.tokens_per_step
        estimate = tokens + view.tokens + view.tokens_per_second * min(now - view.at, self._config.progress_ttl_s)
        self.progress = min(1.0, estimate / wanted)
        # Records are seconds old, and speeds vary: before a round is called, the others are asked directly.
        if self._count is not None and self._count.done():
            counts, self._count = self._count.result(), None
            if counts.called:
                return True
            # What a peer that is behind has done belongs to rounds that the others have held without it.
            counted = min(tokens, own) if counts.behind else tokens
            # Each of the others is in the middle of a step, which it will finish before it comes.
            done = counted + counts.tokens + view.tokens_per_step
            median_steps = median([counted / self._tokens_per_step, *(steps + 1 for steps in counts.steps)])
            missing_s = (wanted - done) / (view.tokens_per_second + tokens_per_second + 1.0)
            # Ask again at the latest after this peer's next quarter of its inner steps: the median may make the round
            # due before the sum does.
            missing_s = min(missing_s, own / 4 / (tokens_per_second + 1.0))
            self._count_at = now + max(_MIN_COUNT_INTERVAL_S, 0.7 * missing_s)
            enough = done >= wanted and median_steps >= _MIN_MEDIAN_SHARE * inner_steps
            return enough or median_steps >= _MAX_MEDIAN_SHARE * inner_steps
        may_be_due = estimate >= wanted or tokens >= _MAX_MEDIAN_SHARE * own
        if self._count is None and may_be_due and now >= self._count_at:
            self._count = self._network.submit(Commands.count_tokens)
        return False
