"""When a round is due: the live peers have together done their inner steps since the last commit.

A fast peer has then done more of them and a slow one fewer; nobody waits for the slowest.
"""

from __future__ import annotations

import time
from concurrent.futures import Future

from spes_swarm.config import RoundConfig
from spes_swarm.network_client import NetworkClient

_MIN_COUNT_INTERVAL_S = 0.1


class Pace:
    """Counts the swarm's tokens since the last commit.

    Attributes:
        progress: of the present round, 0 to 1, as of the last look.
    """

    def __init__(self, network: NetworkClient, config: RoundConfig, tokens_per_step: int) -> None:
        self._network = network
        self._config = config
        self._tokens_per_step = tokens_per_step
        self._count: Future[int] | None = None  # the others' tokens, while they are being asked
        self._count_at = 0.0
        self.progress = 0.0

    def begin(self) -> None:
        """A round begins: what was counted for it is of no use for the next."""
        self._count, self._count_at = None, 0.0

    def due(self, tokens: int, tokens_per_second: float) -> bool:
        """Whether a round is due, with what this peer has done since the last commit, and its speed."""
        inner_steps, view = self._config.inner_steps, self._network.view
        done, wanted = float(tokens), float(inner_steps * self._tokens_per_step)
        if view is None or view.num_training == 0:
            self.progress = min(1.0, done / wanted)
            return done >= wanted
        now = time.monotonic()
        wanted += inner_steps * view.tokens_per_step
        estimate = done + view.tokens + view.tokens_per_second * min(now - view.at, self._config.progress_ttl_s)
        self.progress = min(1.0, estimate / wanted)
        # Records are seconds old, and speeds vary: before a round is called, the others are asked directly.
        if self._count is not None and self._count.done():
            count, self._count = self._count, None
            # Each of the others is in the middle of a step, which it will finish before it comes.
            done += count.result() + view.tokens_per_step
            missing_s = (wanted - done) / (view.tokens_per_second + tokens_per_second + 1.0)
            self._count_at = now + max(_MIN_COUNT_INTERVAL_S, 0.7 * missing_s)
            return done >= wanted
        if self._count is None and estimate >= wanted and now >= self._count_at:
            self._count = self._network.submit("count_tokens")
        return False
