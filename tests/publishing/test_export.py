"""Exports: the same bytes from every peer, in the layout that plain transformers reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from spes_swarm import export
from spes_swarm.base.arguments import shard_bytes
from spes_swarm.base.errors import PublicationError, UserError
from spes_swarm.model.saved_tensors import saved_tensors
from spes_swarm.model.sparse_model import build_model
from spes_swarm.publishing import publication
from spes_swarm.publishing.export import empty_model, split_blocks, write_model
from spes_swarm.publishing.publication import read_export
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.model_state import plain_state_dict
from tests.helpers.publications import MODELS, hashes, layout_for, manifest_of, output_dir, packed, values
from tests.helpers.repository import ROOT


def model_with(model_type: str, seed: int) -> PreTrainedModel:
    """The transformers model that holds a reference."""
    model = build_model(model_type, MODELS[model_type], 0, "cpu")
    state = plain_state_dict(model, layout_for(model_type), values(seed, model_type), include_tied=True)
    model.load_state_dict(state)
    return model


def write_reference(model_type: str, seed: int, destination: Path, shard_size: str = "1GB") -> None:
    """Writes a reference in the layout of transformers."""
    destination.mkdir()
    manifest, blocks = manifest_of(model_type), split_blocks(layout_for(model_type), values(seed, model_type))
    write_model(manifest, empty_model(manifest.run), blocks, destination, shard_size)


@pytest.mark.parametrize("model_type", MODELS)
def test_one_weight_file_is_that_of_save_pretrained(tmp_path: Path, model_type: str) -> None:
    write_reference(model_type, 1, tmp_path / "ours")
    model_with(model_type, 1).save_pretrained(tmp_path / "theirs")
    assert hashes(tmp_path / "ours") == hashes(tmp_path / "theirs")
    assert hashes(tmp_path / "ours").keys() == {"model.safetensors"}


@pytest.mark.parametrize("model_type", MODELS)
def test_several_weight_files_have_the_tensors_of_save_pretrained(tmp_path: Path, model_type: str) -> None:
    """How they are distributed differs: save_pretrained puts views of one storage together, whatever their size."""
    write_reference(model_type, 1, tmp_path / "ours", "50KB")
    model_with(model_type, 1).save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours == theirs
    assert max(path.stat().st_size for path in (tmp_path / "ours").glob("*.safetensors")) < 60_000
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == ours.keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, data in ours.values())


def tensors_of(directory: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of every tensor in a directory's weight files."""
    found: dict[str, tuple[tuple[int, ...], bytes]] = {}
    for path in directory.glob("*.safetensors"):
        found |= {name: (array.shape, array.tobytes()) for name, array in load_file(path).items()}
    return found


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_are_those_of_a_model_that_holds_the_reference(tmp_path: Path, model_type: str) -> None:
    write_reference(model_type, 2, tmp_path / "model", "50KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.arange(96).view(2, 48) % 257
    with torch.no_grad():
        difference = (loaded(ids).logits - model_with(model_type, 2)(ids).logits).abs().max().item()
    assert difference <= 1e-5
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 256


@pytest.mark.parametrize("model_type", MODELS)
def test_nothing_is_copied_on_the_way_to_the_file(model_type: str) -> None:
    """Memory does not grow with the model: what is written is a view of the reference."""
    layout, reference_N = layout_for(model_type), values(3, model_type)
    tensors = saved_tensors(empty_model(manifest_of(model_type).run), layout)
    blocks = split_blocks(layout, reference_N)
    for tensor in tensors.values():
        assert np.shares_memory(tensor.values(blocks), reference_N)


@pytest.mark.slow
def test_whichever_peer_exports_the_weights_are_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in a process of its own with two threads, the other in this one, which has one thread."""
    outs = [output_dir(tmp_path / f"peer{peer}", 7, peer) for peer in (0, 1)]
    commands = [[str(out), str(tmp_path / f"model{peer}"), "--max-shard-size", "60KB"] for peer, out in enumerate(outs)]
    assert torch.get_num_threads() == 1
    code = export.main(commands[0])
    here = capsys.readouterr()
    other = subprocess.run(
        [sys.executable, "-m", "spes_swarm.export", *commands[1]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    for returncode, stdout, stderr in ((code, *here), (other.returncode, other.stdout, other.stderr)):
        assert (returncode, stderr) == (0, "")
        assert stdout.startswith(f"round 7 of {manifest_of().run_id} ")
    assert hashes(tmp_path / "model0", "*") == hashes(tmp_path / "model1", "*")
    publication = read_export(tmp_path / "model0")
    assert (publication.round, len(publication.weights)) == (7, len(hashes(tmp_path / "model0")))
    assert len(publication.weights) > 2


_WITHOUT_SPES_SWARM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "spes_swarm":
            raise ImportError("blocked")

sys.meta_path.insert(0, Blocked())
code = open("README.md").read().split("```python\\n")[1].split("```")[0]
exec(code.replace("PATH_OF_THIS_DIRECTORY", "."))
assert not any(name.split(".")[0] == "spes_swarm" for name in sys.modules)
"""


@pytest.mark.slow
def test_the_code_on_the_card_works_without_spes_swarm(tmp_path: Path) -> None:
    assert export.main([str(output_dir(tmp_path / "out", 3)), str(tmp_path / "model")]) == 0
    done = subprocess.run(
        [sys.executable, "-I", "-c", _WITHOUT_SPES_SWARM],
        cwd=tmp_path / "model",
        env={"PATH": "/usr/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main")


# Mistakes.


def complaint(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that an export ends with."""
    assert export.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_destination_that_has_something_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_dir(tmp_path / "out", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "is not empty" in complaint(capsys, out, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "out"]


def test_a_directory_that_is_not_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the output directory of a run" in complaint(capsys, tmp_path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_peer_that_has_no_checkpoint_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_dir(tmp_path / "out", 1)
    shutil.rmtree(out / "checkpoints")
    assert "has no checkpoint yet" in complaint(capsys, out, tmp_path / "model")


@pytest.mark.parametrize("aside", [False, True])
def test_a_peer_that_has_only_damaged_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], aside: bool
) -> None:
    out = output_dir(tmp_path / "out", 1)
    (newest,) = (out / "checkpoints").iterdir()
    (newest / "meta.json").write_text("{")
    if aside:
        newest.rename(newest.with_name(f"broken-{newest.name}"))
    line = complaint(capsys, out, tmp_path / "model")
    assert ("has only damaged checkpoints" if aside else "meta.json is corrupt") in line
    assert line.endswith("; use the output directory of another peer of the run, which has the same model")


def test_a_peer_that_has_only_a_checkpoint_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = output_dir(tmp_path / "out", 1)
    (newest,) = (out / "checkpoints").iterdir()
    (newest.with_name(f"broken-{newest.name}")).mkdir()
    (newest / "meta.json").write_text('{"format": 2}')
    line = complaint(capsys, out, tmp_path / "model")
    assert "written by another version" in line
    assert "damaged" not in line


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_dir(output_dir(tmp_path / "out", 1), 2)
    newest = max((out / "checkpoints").iterdir())
    reference = newest / "reference-00001.safetensors"
    data = bytearray(reference.read_bytes())
    data[-1] ^= 1
    reference.write_bytes(data)
    assert export.main([str(out), str(tmp_path / "model")]) == 0
    assert read_export(tmp_path / "model").round == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("export: skipping a checkpoint: ")
    assert "reference-00001.safetensors is corrupt" in line


def test_a_publication_that_nobody_could_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "MAX_PUBLICATION_BYTES", 1000)
    with pytest.raises(PublicationError, match=r"the export: spes_swarm\.json is larger than"):
        packed(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["", "5", "1XB", "0MB", "-1GB", "1e9GB", "10MB\n1"])
def test_a_shard_size_that_is_none(size: str) -> None:
    with pytest.raises(UserError, match="500MB"):
        shard_bytes(size)


def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_dir(tmp_path / "out", 1)
    assert "No space left on device" in complaint(capsys, out, small_disk / "model")
    assert not list(small_disk.iterdir())


def test_an_identity_is_neither_needed_nor_made(tmp_path: Path) -> None:
    out = output_dir(tmp_path / "out", 1)
    assert export.main([str(out), str(tmp_path / "model")]) == 0
    assert not RunDirectory(out).identity.exists()
