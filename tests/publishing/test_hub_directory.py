"""Publications in a directory: whole ones only, whenever a publisher is killed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from spes_swarm.base.errors import ConfigError, HubError, PublicationError, SupersededError
from spes_swarm.publishing.card import Results
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.export import pack
from spes_swarm.publishing.publication import read_export
from spes_swarm.publishing.publisher import check_target, open_target
from spes_swarm.publishing.target import Published, parse_location, round_of
from tests.helpers.publications import manifest_of, packed, snapshot

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.publishing.test_hub_directory"])


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rounds 0 to 3, ready to be published."""
    directory = tmp_path_factory.mktemp("exports")
    return [packed(directory, number)[0] for number in range(4)]


def publish(target: DirectoryTarget, export: Path, tag: str | None = None) -> Published:
    return target.publish(export, read_export(export), tag)


def rounds(directory: Path) -> list[int]:
    """The published rounds."""
    return sorted(int(path.name.removeprefix("round-")) for path in (directory / "revisions").glob("round-*"))


@pytest.mark.slow
def test_readers_find_each_round_and_the_newest(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path / "models")
    assert target.newest() is None
    for number in (1, 2, 3):
        published = publish(target, exports[number])
        assert (published.status, published.round) == ("published", number)
        assert published.revision == f"round-{number:06d}"
        newest = target.newest()
        assert newest is not None
        assert newest.round == number
    assert rounds(tmp_path / "models") == [1, 2, 3]
    for number in (1, 2, 3):
        assert read_export(tmp_path / "models" / "revisions" / f"round-{number:06d}").round == number
    assert read_export(tmp_path / "models" / "main").round == 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "main")


@pytest.mark.slow
def test_publishing_again_writes_nothing(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[1])
    again = publish(target, exports[1])
    assert (again.status, again.bytes_sent) == ("unchanged", 0)


@pytest.mark.slow
def test_unchanged_files_are_shared(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    first, second = publish(target, exports[1]), publish(target, exports[2])
    one, two = (tmp_path / "revisions" / f"round-00000{n}" for n in (1, 2))
    assert (one / "tokenizer.json").samefile(two / "tokenizer.json")
    assert not (one / "README.md").samefile(two / "README.md")
    assert second.bytes_sent is not None
    assert first.bytes_sent is not None
    assert second.bytes_sent < first.bytes_sent - (one / "tokenizer.json").stat().st_size + 100


@pytest.mark.slow
def test_a_damaged_file_is_not_shared(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[1])
    (tmp_path / "main" / "tokenizer.json").write_text("{}")
    publish(target, exports[2])
    assert read_export(tmp_path / "main").round == 2


@pytest.mark.slow
def test_rounds_only_go_forward(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[2])
    with pytest.raises(SupersededError, match="has round 2 already"):
        publish(target, exports[1])
    fork = pack(snapshot(3), tmp_path / "fork", Results()).model_copy(update={"round": 2})
    with pytest.raises(SupersededError, match="another state of round 2"):
        target.publish(tmp_path / "fork", fork)
    assert rounds(tmp_path) == [2]


@pytest.mark.slow
def test_a_directory_belongs_to_one_run(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[1])
    other = pack(snapshot(2, manifest_of(name="other")), tmp_path / "other", Results())
    with pytest.raises(PublicationError, match=f"belongs to run {manifest_of().run_id}"):
        target.publish(tmp_path / "other", other)
    # A peer of the other run learns it at its start.
    with pytest.raises(PublicationError, match=f"belongs to run {manifest_of().run_id}, not other-run; choose another"):
        check_target(f"file:{tmp_path}", "other-run")
    assert check_target(f"file:{tmp_path}", manifest_of().run_id) is None
    assert check_target(f"file:{tmp_path}/new/one", "other-run") is None


@pytest.mark.slow
def test_the_newest_and_the_tagged_are_kept(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    for number, export in enumerate(exports):
        publish(target, export, "milestone" if number == 0 else None)
    assert target.prune(keep=1) == [1, 2]
    assert rounds(tmp_path) == [0, 3]
    assert target.prune(keep=1) == []
    assert read_export(tmp_path / "tags" / "milestone").round == 0
    with pytest.raises(HubError, match="has a tag milestone already"):
        publish(target, exports[3], "milestone")


def test_one_publisher_at_a_time(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[1])
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HubError, match="in use by another process"):
            publish(target, exports[2])
    publish(target, exports[2])


def test_an_export_that_changes_meanwhile_is_not_published(tmp_path: Path, exports: list[Path]) -> None:
    shutil.copytree(exports[1], tmp_path / "export")
    publication = read_export(tmp_path / "export")
    (tmp_path / "export" / "config.json").write_text("{}")
    target = DirectoryTarget(tmp_path / "models")
    with pytest.raises(PublicationError, match="has changed since it was exported"):
        target.publish(tmp_path / "export", publication)
    assert target.newest() is None
    assert not list((tmp_path / "models" / "revisions").iterdir())


def test_a_disk_that_is_full(small_disk: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(small_disk / "models")
    with pytest.raises(HubError, match="on a full disk"):
        publish(target, exports[1])
    assert target.newest() is None
    assert not list((small_disk / "models" / "revisions").iterdir())


def test_a_directory_that_cannot_be_written(tmp_path: Path, exports: list[Path]) -> None:
    (tmp_path / "file").touch()
    target = DirectoryTarget(tmp_path / "file" / "models")
    for attempt in (target.check_rights, lambda: publish(target, exports[1])):
        with pytest.raises(HubError, match="cannot be written") as refusal:
            attempt()
        assert str(tmp_path) not in str(refusal.value)
    DirectoryTarget(tmp_path / "new" / "models").check_rights()
    assert not (tmp_path / "new").exists()


# Killed.


def publish_and_die(models: Path, export: Path, step: int | None, size: int | None) -> None:
    """Publishes, and is killed before its `step`-th file operation, or when a file of it reaches `size` bytes."""
    if size is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    steps = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        if event == "open" or event.startswith(("os.", "shutil.")):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    publish(DirectoryTarget(models), export)
    print(steps, file=(models.parent / "steps").open("w"))


def run_and_die(models: Path, export: Path, step: int | None = None, size: int | None = None) -> int | None:
    process = _CONTEXT.Process(target=publish_and_die, args=(models, export, step, size))
    process.start()
    process.join(60)
    return process.exitcode


@pytest.fixture(scope="module")
def num_steps(tmp_path_factory: pytest.TempPathFactory, exports: list[Path]) -> int:
    """File operations of a second publication."""
    directory = tmp_path_factory.mktemp("steps")
    publish(DirectoryTarget(directory / "models"), exports[1])
    assert run_and_die(directory / "models", exports[2]) == 0
    return int((directory / "steps").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_killed_publisher_leaves_whole_publications(
    tmp_path: Path, exports: list[Path], num_steps: int, seed: int
) -> None:
    target, rng = DirectoryTarget(tmp_path / "models"), random.Random(seed)
    publish(target, exports[1])
    if seed % 2:
        largest = max(path.stat().st_size for path in exports[2].iterdir())
        death = run_and_die(tmp_path / "models", exports[2], size=rng.randrange(1, largest))
        assert death == -signal.SIGXFSZ
    else:
        death = run_and_die(tmp_path / "models", exports[2], step=rng.randrange(1, num_steps + 1))
        assert death == -signal.SIGKILL
    newest = read_export(tmp_path / "models" / "main")
    assert newest.round in (1, 2)
    for number in rounds(tmp_path / "models"):
        assert read_export(tmp_path / "models" / "revisions" / f"round-{number:06d}").round == number
    publish(target, exports[2])
    assert read_export(tmp_path / "models" / "main").round == 2
    left_over = {path.name for path in (tmp_path / "models").rglob(".*")}
    assert left_over == {".lock"}


@pytest.mark.slow
def test_what_a_killed_publisher_left_whole_is_used(tmp_path: Path, exports: list[Path]) -> None:
    target = DirectoryTarget(tmp_path)
    publish(target, exports[1])
    publish(target, exports[2])
    (tmp_path / "main").unlink()
    (tmp_path / "main").symlink_to("revisions/round-000001")  # as if killed before the last step
    inode = (tmp_path / "revisions" / "round-000002" / "config.json").stat().st_ino
    again = publish(target, exports[2])
    assert (again.status, again.bytes_sent) == ("published", 0)
    assert (tmp_path / "main" / "config.json").stat().st_ino == inode


# Names.


@pytest.mark.parametrize(
    "text", ["", "file:", "model", "a/b/c", "a b/c", "user/repo@main", "-x/y", "https://hf.co/a/b"]
)
def test_a_target_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError):
        open_target(text)


def test_locations(tmp_path: Path) -> None:
    def read(text: str) -> tuple[str | None, Path | None, str | None]:
        found = parse_location(text, with_revision=True)
        return found.repo_id, found.path, found.revision

    assert read("user/repo") == ("user/repo", None, None)
    assert read("user/repo@round-000120") == ("user/repo", None, "round-000120")
    assert read(f"file:{tmp_path}@round-000120") == (None, tmp_path, "round-000120")
    (tmp_path / "a@b").mkdir()
    assert read(f"file:{tmp_path}/a@b") == (None, tmp_path / "a@b", None)
    for wrong in ("user/repo@", "user/repo@../x", "user/repo@a/b"):
        with pytest.raises(ConfigError):
            parse_location(wrong, with_revision=True)


@pytest.mark.parametrize("tag", ["main", "round-000001", "../x", "", "a b", ".hidden", "x" * 65, "a/b"])
def test_a_tag_that_is_none(tmp_path: Path, exports: list[Path], tag: str) -> None:
    with pytest.raises(ConfigError, match="tag"):
        publish(DirectoryTarget(tmp_path / "models"), exports[1], tag)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("name", "number"),
    [("round-000007", 7), ("round-1234567", 1234567), ("round-7", None), ("round-0000007", None), ("main", None)],
)
def test_names_of_rounds(name: str, number: int | None) -> None:
    assert round_of(name) == number
