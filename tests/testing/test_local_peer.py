"""Peers as child processes: what is read of them while they write."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from scripts.testing.local_peer import LocalPeer
from tests.helpers.empty_process import launch_nothing

NUM_EVENTS = 3000


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"event": "of an earlier stay"}\n', encoding="utf-8")

    def write() -> None:
        file = os.open(metrics, os.O_WRONLY | os.O_APPEND)
        for number in range(NUM_EVENTS):
            line = json.dumps({"event": "step", "step": number, "name": "è"}, ensure_ascii=False).encode() + b"\n"
            for start in range(0, len(line), 7):
                os.write(file, line[start : start + 7])
        os.close(file)

    with LocalPeer(tmp_path, [], launch_nothing) as peer:
        writer = threading.Thread(target=write)
        writer.start()
        seen: list[int] = []
        while writer.is_alive():
            seen += [event["step"] for event in peer.new_events()]
            assert [event["step"] for event in peer.events("step")][: len(seen)] == seen
        writer.join()
        seen += [event["step"] for event in peer.new_events()]
        assert seen == list(range(NUM_EVENTS))
        assert len(peer.events()) == NUM_EVENTS
