"""The command: what it prints, how it ends, and what it never tells."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.local_peer import PATIENCE_S
from spes_swarm import publish
from spes_swarm.export import export_model
from spes_swarm.publishing import client
from spes_swarm.publishing.card import results_of_metrics
from spes_swarm.publishing.publication import PUBLICATION_FILE, parse_publication, read_export
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.publications import assert_complete, manifest_of, output_dir, packed
from tests.helpers.repository import ROOT

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"

# huggingface_hub still sends files as its HTTP library no longer likes them.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
SECRET_DIRECTORY = "recognisable-directory"
_names = iter(f"user/published-{number}" for number in range(1000))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """One server for all tests."""
    with HubServer(tmp_path_factory.mktemp("hub"), 64 * 1024) as server:
        yield server


@pytest.fixture
def name() -> str:
    """A repository that is not there yet."""
    return next(_names)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A peer's output directory with a checkpoint of round 5."""
    return output_dir(tmp_path / SECRET_DIRECTORY / "out", 5)


class Outcome:
    """How the command ended, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: Any) -> None:
        self.code = publish.main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    def line(self) -> str:
        """The one line of a mistake."""
        assert self.code == 2, self.err
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("publish: ")
        assert SECRET_DIRECTORY not in line
        return line.removeprefix("publish: ")

    def summary(self) -> dict[str, Any]:
        """The line of JSON."""
        assert (self.code, self.err) == (0, "")
        (line,) = self.out.splitlines()
        return dict(json.loads(line))


@pytest.fixture
def environment(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process uses the server, and waits less than a user would."""
    for key, value in hub.environment().items():
        if key.startswith("HF_"):
            monkeypatch.setenv(key, value)
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.01)


def start(hub: HubServer, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """The command as a running peer starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "spes_swarm.publish", *map(str, arguments)],
        cwd=ROOT,
        env={**hub.environment(), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_peer_publishes_to_a_directory(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / SECRET_DIRECTORY / "models"
    summary = Outcome(capsys, out, "--to", f"file:{models}", "--json").summary()
    assert summary["status"] == "published"
    assert (summary["round"], summary["revision"], summary["removed_rounds"]) == (5, "round-000005", [])
    publication = read_export(models / "main")
    assert (publication.digest, publication.manifest) == (summary["digest"], manifest_of())
    assert summary["bytes_sent"] > sum(file.size for file in publication.files)
    assert sorted(path.name for path in (out / "publication").iterdir()) == [".lock"]
    again = Outcome(capsys, out, "--to", f"file:{models}", "--json", "--tag", "best", "--keep", "1").summary()
    assert (again["status"], again["bytes_sent"]) == ("unchanged", 0)
    assert read_export(models / "tags" / "best") == publication


@pytest.mark.slow
def test_what_is_known_of_the_run_is_on_the_card(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def results(number: int) -> Path:
        path = tmp_path / f"results-{number}.json"
        content = {
            "tokens": 1000 * number,
            "peers": 3,
            "history": [{"round": number, "tokens": 1000 * number, "loss": 5.0 - 0.1 * number}],
            "contributors": [{"name": "Ada <b>", "tokens": 600}, {"name": "Ben", "tokens": 400}],
        }
        path.write_text(json.dumps(content))
        return path

    models = tmp_path / "models"
    for number in (5, 6):
        directory = output_dir(out, number)
        more = ["--license", "apache-2.0", "--data", "the standard library", "--join-address", f"{ADDRESS}/"]
        assert Outcome(capsys, directory, "--to", f"file:{models}", "--results", results(number), *more).code == 0
    publication = read_export(models / "main")
    assert (publication.tokens, publication.peers) == (6000, 3)
    assert [point.round for point in publication.history] == [5, 6]  # the other publisher's, too
    card = (models / "main" / "README.md").read_text()
    for text in ("6,000", "Ben", "‹b›", "apache-2.0", "the standard library", f"{ADDRESS} ", "loss.png"):
        assert text in card
    assert "<b>" not in card


def test_an_exported_directory_is_published_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export, publication = packed(tmp_path, 9)
    summary = Outcome(capsys, export, "--to", f"file:{tmp_path / 'models'}", "--json").summary()
    assert (summary["round"], summary["digest"]) == (9, publication.digest)
    assert export.exists()
    line = Outcome(capsys, export, "--to", f"file:{tmp_path / 'm'}", "--license", "mit", "--data", "books").line()
    assert "--license, --data would change nothing" in line


@pytest.mark.slow
def test_the_event_log_tells_the_history(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"event": "round", "round": 1, "eval_loss": 4.0, "peers": 2},
        {"event": "step", "round": 1, "loss": 1.0},
        {"event": "round", "round": 3, "eval_loss": None, "peers": 2},
        {"event": "round", "round": 5, "eval_loss": 3.0, "eval_loss_stderr": 0.0312, "peers": 4},
        {"event": "round", "round": 6, "eval_loss": 2.0, "peers": 9},  # after the checkpoint
        {"event": "round", "round": "x", "eval_loss": 2.0},
    ]
    lines = [json.dumps(event) for event in events]
    (out / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "round", "rou']))
    assert Outcome(capsys, out, "--to", f"file:{tmp_path / 'models'}").code == 0
    publication = read_export(tmp_path / "models" / "main")
    assert [(point.round, point.loss, point.stderr) for point in publication.history] == [
        (1, 4.0, None),
        (5, 3.0, 0.0312),
    ]
    assert "3.000 ± 0.031 (standard error)" in (tmp_path / "models" / "main" / "README.md").read_text()
    assert (publication.peers, publication.tokens) == (4, None)
    # An export says the same.
    export_model(out, tmp_path / "exported")
    for name in ("README.md", "spes_swarm.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "models" / "main" / name).read_bytes()


def test_a_figure_that_makes_no_sense_costs_only_itself(tmp_path: Path) -> None:
    lines = [
        '{"event": "round", "round": 1, "eval_loss": 4.0, "eval_loss_stderr": NaN, "swarm_tokens": -5, "peers": "x"}',
        '{"event": "round", "round": 2, "eval_loss": Infinity, "swarm_tokens": 200, "peers": 3}',
        '{"event": "round", "round": 3, "eval_loss": 3.5, "eval_loss_stderr": [], "swarm_tokens": 300.5, "peers": 4}',
        '{"event": "round", "round": 3}',  # as after a restart: no number of peers takes back one
        '{"event": "round", "round": 3, "peers": true}',
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    results = results_of_metrics(path, 3)
    assert results.peers == 4
    assert [(point.round, point.tokens, point.loss, point.stderr) for point in results.history] == [
        (1, None, 4.0, None),
        (3, None, 3.5, None),
    ]
    assert results_of_metrics(path, 2).peers == 3


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_peer_publishes_to_a_hub(hub: HubServer, name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Outcome(capsys, out, "--to", name, "--tag", "milestone", "--private")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("round 5 published (")
    assert hub.refs(name).keys() == {"main", "round-000005", "milestone"}
    files = hub.files(name)
    assert_complete(files, parse_publication(files[PUBLICATION_FILE], "test"))
    assert f'from_pretrained("{name}", revision="round-000005")'.encode() in files["README.md"]


# Mistakes.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--to", "nonsense"], "neither USER/REPO nor file:DIRECTORY"),
        (["--to", "file:"], "followed by a directory"),
        (["--to", "file:{}/models", "--tag", "main"], "tag 'main'"),
        (["--to", "file:{}/models", "--max-shard-size", "big"], "shard size"),
        (["--to", "file:{}/models", "--license", "<x>"], "Hub identifier"),
        (["--to", "file:{}/models", "--results", "{}/none.json"], "--results: No such file"),
        (["--to", "file:{}/out/manifest.json"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(out: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    assert why in Outcome(capsys, out, *[a.replace("{}", str(out.parent)) for a in arguments]).line()
    assert not (out.parent / "models" / "main").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"surprise": 1}', '{"tokens": "many"}', '{"history": [{}]}'])
def test_results_that_make_no_sense(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert "--results: " in Outcome(capsys, out, "--to", f"file:{tmp_path / 'm'}", "--results", path).line()


def test_directories_that_have_nothing_to_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / SECRET_DIRECTORY
    assert "DIR is not the output directory of a run" in Outcome(capsys, where, "--to", f"file:{tmp_path}/m").line()
    out = output_dir(where, 1)
    shutil.rmtree(out / "checkpoints")
    assert "has no checkpoint yet" in Outcome(capsys, where, "--to", f"file:{tmp_path}/m").line()


def test_an_older_round_than_the_published(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = f"file:{tmp_path / SECRET_DIRECTORY / 'models'}"
    Outcome(capsys, out, "--to", models)
    earlier = output_dir(tmp_path / "earlier", 4, peer=1)
    assert "has round 5 already, which is newer than round 4" in Outcome(capsys, earlier, "--to", models).line()
    assert not (earlier / "publication").exists()  # found out before anything is exported


def test_a_full_disk_where_the_peer_is(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint fits, an export does not."""
    subprocess.run(["mount", "-o", f"remount,size={640 << 10}", str(small_disk)], check=True)
    out = output_dir(small_disk / SECRET_DIRECTORY, 1)
    assert "No space left on device" in Outcome(capsys, out, "--to", f"file:{tmp_path / 'models'}").line()
    assert sorted(path.name for path in (out / "publication").iterdir()) == [".lock"]


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_hub_without_room(hub: HubServer, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_dir(tmp_path / SECRET_DIRECTORY, 77)  # weights that no other test has sent
    hub.fail_next("status", match="PUT /_lfs/", status=507)
    assert "the Hub has no room left" in Outcome(capsys, out, "--to", name).line()
    assert Outcome(capsys, out, "--to", name).code == 0


@pytest.mark.usefixtures("environment")
def test_a_token_that_does_not_do(
    name: str, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in Outcome(capsys, out, "--to", name).line()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "cannot create it" in Outcome(capsys, out, "--to", "somebody/model").line()


# As a subprocess of a peer.


@pytest.mark.slow
def test_the_background_leaves_processor_and_disk_to_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with a whole publication: beside two busy processes, that takes the lowest priority six minutes."""
    code = "import psutil; from spes_swarm.publish import go_to_background; go_to_background(); p = psutil.Process(); "
    code += "print(p.nice(), p.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "19 True\n"
    calls: list[str] = []
    monkeypatch.setattr(publish, "go_to_background", lambda: calls.append("background"))
    Outcome(capsys, "nowhere", "--to", "file:nowhere").line()
    assert calls == []
    Outcome(capsys, "nowhere", "--to", "file:nowhere", "--background").line()
    assert calls == ["background"]


@pytest.mark.slow
def test_a_publisher_that_is_killed_is_gone_on_with_and_tells_no_secrets(
    hub: HubServer, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: None
) -> None:
    out = output_dir(tmp_path / SECRET_DIRECTORY, 87)
    said = Outcome(capsys, out, "--to", name)
    everything = [(said.out, said.err)]
    first = hub.files(name)
    output_dir(out, 88)
    hub.fail_next("hold", match="PUT /_lfs/", fraction=0.5)
    killed = start(hub, out, "--to", name)
    hub.wait_held()
    killed.send_signal(signal.SIGKILL)
    everything.append(killed.communicate())
    hub.mend()
    hub.release()
    assert hub.files(name) == first
    last = Outcome(capsys, out, "--to", name, "--json")
    everything.append((last.out, last.err))
    summary = last.summary()
    assert (summary["status"], summary["round"], summary["revision"]) == ("published", 88, hub.commits(name)[0])
    files = hub.files(name)
    assert_complete(files, parse_publication(files[PUBLICATION_FILE], "test"))
    assert sorted(path.name for path in (out / "publication").iterdir()) == [".lock"]
    produced = [text.encode() for texts in everything for text in texts]
    produced += [data for published in (first, files) for data in published.values()]
    for secret in (TOKEN, SECRET_DIRECTORY, str(tmp_path)):
        assert not [data for data in produced if secret.encode() in data]
