"""How large a weight file may be."""

from __future__ import annotations

import re

from spes_swarm.base.errors import UserError

# A transfer that breaks off is taken up again at the last whole file.
MAX_SHARD_SIZE = "1GB"


def shard_bytes(size: str) -> int:
    """What "500MB" or "1GB" is in bytes.

    Raises:
        UserError: it is neither KB, MB, GB nor TB.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})([KMGT])B", size.strip().upper())
    if match is None:
        raise UserError(f"shard size {size!r:.40}: expected something like 500MB or 1GB")
    return int(match[1]) * {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2]]
