"""`python -m tests.helpers.broken_rank ...`: join whose ranks other than 0 fail at their first step."""

from __future__ import annotations

import sys

from spes_swarm.join import main
from spes_swarm.training.ranks import follower
from tests.helpers.broken_join import planted

if __name__ == "__main__":
    setattr(follower, "compute_share", planted)  # noqa: B010
    sys.exit(main(sys.argv[1:]))
