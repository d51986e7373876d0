"""The command that a founder prints for others, and what it says of the data."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest

from spes_swarm.config.data import DataConfig
from spes_swarm.config.join_command import describe_data, join_command, join_note
from spes_swarm.config.manifest import found_run, open_manifest
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity

STDLIB = DataConfig(kind="stdlib", python_version=platform.python_version())
OWN = DataConfig(kind="own")
UNKNOWN = DataConfig()


@pytest.mark.parametrize(
    ("data", "end", "note"),
    [
        (STDLIB, "", None),
        (UNKNOWN, "", None),
        (OWN, " --data YOUR_DATA", "put the path of your own data after --data"),
        (
            DataConfig(kind="corpus", name="verses.txt", digest="ab" * 32),
            " --data verses.txt",
            "'verses.txt' (digest abababababab) is what the run trains on: put the path of your copy after --data",
        ),
        (DataConfig(kind="hf", name="user/verses", revision="ab" * 20, digest="0" * 64), "", None),
        (
            DataConfig(kind="hf", name="verses", config="en", digest="ab" * 32),
            " --data hf:./verses:en",
            "'verses' (configuration en, digest abababababab) is what the run trains on: put the path of your copy "
            "after --data",
        ),
        (
            DataConfig.mixed(((0.75, STDLIB), (0.25, DataConfig(kind="corpus", name="a.txt")))),
            " --data '0.75*stdlib + 0.25*a.txt'",
            "the run trains on 0.75 of the Python standard library and 0.25 of 'a.txt': put the paths of your copies "
            "into --data",
        ),
    ],
)
def test_the_command_carries_what_a_joiner_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: DataConfig, end: str, note: str | None
) -> None:
    manifest = found_run(dataclasses.replace(run_config(), data=data), "layout", identity(0))
    assert open_manifest(manifest.to_wire(), "peer").run.data == data
    monkeypatch.chdir(tmp_path)
    start = f"python -m spes_swarm.join --initial-peers /ip4/192.0.2.7/tcp/1/p2p/Qm --run-id {manifest.run_id}"
    directory = f"runs/test-{manifest.run_id.removeprefix('test-')[:8]}"
    for name in (directory, f"{directory}-2", f"{directory}-3"):  # a new one each time
        expected = f"{start} --output-dir {name}{end}"
        assert join_command(manifest.run_id, data, "/ip4/192.0.2.7/tcp/1/p2p/Qm") == expected
        on_one = join_command(manifest.run_id, data, "/ip4/192.0.2.7/tcp/1/p2p/Qm", one_thread=True)
        assert on_one == f"{start} --output-dir {name} --num-threads 1{end}"
        Path(name).mkdir(parents=True)
    assert join_note(data) == note


def test_descriptions() -> None:
    assert describe_data(STDLIB) == "the Python standard library"
    assert describe_data(DataConfig(kind="corpus")) == "a corpus"
    assert describe_data(OWN) == "each peer's own data"
