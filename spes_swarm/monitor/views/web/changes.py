"""The change between two states of the monitor, small enough to send twice a second.

With a thousand peers a state has some 400 KB, of which little changes from one to the next. A change has these keys:

    time       of the new state
    head       fields of the state, other than `peers` and `experts`, that differ, in full
    peers      for each changed or new peer, its id and the fields that differ (all of them if it is new)
    gone       ids of peers that have disappeared
    experts    entries that differ, in full
    history    new or corrected points

Equal parts are omitted. `age_s` grows constantly, so it counts as changed only if the time of the record (the time of
the state minus `age_s`) has moved to another second; the receiver advances the other ages by its clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from spes_swarm.monitor.state import HistoryPoint

Json = dict[str, Any]

_RECHECKED_POINTS: Final = 32  # the newest old points, which may still be corrected (such as by a late evaluation)


def difference(old: Json, new: Json) -> Json | None:
    """The change from `old` to `new`; None if a whole state has to be sent (another run or number of experts)."""
    if old["run"]["run_id"] != new["run"]["run_id"] or len(old["experts"]) != len(new["experts"]):
        return None
    change: Json = {"time": new["time"]}
    head = {key: new[key] for key in new if key not in ("time", "peers", "experts") and new[key] != old.get(key)}
    if head:
        change["head"] = head
    peers, gone = _peer_changes(old, new)
    if peers:
        change["peers"] = peers
    if gone:
        change["gone"] = gone
    experts = [entry for entry, before in zip(new["experts"], old["experts"], strict=True) if entry != before]
    if experts:
        change["experts"] = experts
    return change


def new_points(old: Sequence[HistoryPoint], new: Sequence[HistoryPoint]) -> list[HistoryPoint] | None:
    """Points of `new` that `old` lacks or that differ in it; None if `new` does not continue `old`."""
    if len(new) < len(old) or (old and new[0].round != old[0].round):
        return None
    start = max(0, len(old) - _RECHECKED_POINTS)
    return [point for index, point in enumerate(new[start:], start) if index >= len(old) or point != old[index]]


def _peer_changes(old: Json, new: Json) -> tuple[list[Json], list[str]]:
    before = {peer["peer_id"]: peer for peer in old["peers"]}
    changed = []
    for peer in new["peers"]:
        known = before.pop(peer["peer_id"], None)
        if known is None:
            changed.append(peer)
            continue
        fields = {key: value for key, value in peer.items() if key != "age_s" and value != known.get(key)}
        if math.floor(new["time"] - peer["age_s"]) != math.floor(old["time"] - known["age_s"]):
            fields["age_s"] = peer["age_s"]
        if fields:
            changed.append({"peer_id": peer["peer_id"], **fields})
    return changed, list(before)
