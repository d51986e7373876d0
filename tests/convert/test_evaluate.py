"""Evaluation with lm-evaluation-harness, without a network, and what it leaves in a model card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from spes_swarm.base.errors import CheckpointError, ConfigError, UserError
from spes_swarm.convert.evaluation import Evaluation, Score, attach, check_export, evaluate
from spes_swarm.data.tokenizer import ByteTokenizer
from spes_swarm.evaluate import _be_one_process, main
from spes_swarm.model.sparse_model import build_model
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

TASKS = ROOT / "spes_swarm" / "convert" / "tasks"
SETTINGS: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    ByteTokenizer().save(directory)
    return directory


def train(model: PreTrainedModel, steps: int) -> None:
    """A minute of a volunteer's time in a second: the same text that runs train on by default."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "textwrap.py", "difflib.py"))
    data_N = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(data_N) - 128, (16,), generator=generator)
        ids_BT = torch.stack([data_N[start : start + 128] for start in starts])
        optimizer.zero_grad()
        model(ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()


# The harness takes seconds to import, so one process runs every command line. Two things that do not change between
# command lines are computed once: the index of its 14,000 task files, and the list of installed packages.
_RUN_ALL = """
import contextlib, functools, io, json, sys
from pathlib import Path
import torch
import torch.utils.collect_env as environment
torch.set_num_threads(1)
environment.get_pretty_env_info = functools.cache(environment.get_pretty_env_info)
from lm_eval.tasks._index import TaskIndex
build = TaskIndex.build
index = functools.cache(lambda path, **options: build([path], **options))
def build_cached(paths, **options):
    return {name: entry for path in paths for name, entry in index(path, **options).items()}
TaskIndex.build = staticmethod(build_cached)
from spes_swarm.evaluate import main
outcomes = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    card = Path(arguments[0], "README.md")
    outcomes.append([code, out.getvalue(), err.getvalue(), card.read_text() if card.exists() else None])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("evaluation")
    model = build_model("olmoe", SETTINGS, seed=0, device="cpu")
    untrained = save(model, root / "untrained")
    train(model, steps=40)
    trained = save(model, root / "trained")
    (trained / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# A model\n")
    (trained / "spes_swarm.json").write_text(json.dumps({"run_id": "r-1", "round": 7, "digest": "ab", "host": "x"}))
    own = root / "own"
    own.mkdir()
    (own / "own.yaml").write_text("group: both\ntask: [python_lines, python_bytes]\n")
    (own / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: /nowhere/x.jsonl}\ntest_split: train\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\nmetric_list: [{metric: acc}]\n"
    )
    (root / "elsewhere.yaml").write_text(
        f"include: {TASKS / 'python_bytes.yaml'}\ntask: elsewhere\ncustom_dataset: !function {TASKS}/data.load\n"
    )
    commands = {
        "untrained": [untrained, "--output", root / "untrained.json"],
        "trained": [trained, "--output", root / "trained.json", "--attach"],
        "group": [
            *(trained, "--tasks", f"both,{root / 'elsewhere.yaml'}", "--include-path", own),
            *("--limit", 5, "--output", root / "group.json"),
        ],
        "unknown": [trained, "--tasks", "python_line"],
        "no file": [trained, "--tasks", own / "nothing.yaml"],
        "broken": [trained, "--tasks", "broken", "--include-path", own],
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL],
        input=json.dumps([[str(argument) for argument in arguments] for arguments in commands.values()]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(root / "hub")},
    )
    assert done.returncode == 0, done.stderr
    results = dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for name in commands:
        if (file := root / f"{name}.json").exists():
            results[f"{name}.json"] = json.loads(file.read_text())
    return results


def scores(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(score["task"], score["metric"]): score for score in result["scores"]}


def test_an_untrained_model_guesses_and_a_trained_one_knows_better(outcomes: dict[str, Any]) -> None:
    untrained, trained = scores(outcomes["untrained.json"]), scores(outcomes["trained.json"])
    assert untrained.keys() == trained.keys()
    line, byte = ("python_lines", "acc"), ("python_bytes", "byte_perplexity")
    assert untrained[line]["value"] == pytest.approx(0.25, abs=0.12)
    assert untrained[byte]["value"] == pytest.approx(272, rel=0.15)  # all ids are about equally likely
    assert trained[line]["value"] > 0.6
    assert trained[byte]["value"] < 30
    assert (line, trained[line]["num_samples"]) == (line, 200)
    assert (byte, trained[byte]["num_samples"]) == (byte, 100)
    accuracy = trained[line]["value"]
    assert trained[line]["stderr"] == pytest.approx((accuracy * (1 - accuracy) / 199) ** 0.5)
    assert trained[byte]["stderr"] is None


def test_the_figures_are_those_of_the_model(outcomes: dict[str, Any], tmp_path: Path) -> None:
    """Bits per byte, recomputed without the harness for texts that fit into one window."""
    rows = [json.loads(line) for line in (TASKS / "python_bytes.jsonl").read_text().splitlines()]
    model = build_model("olmoe", SETTINGS, seed=0, device="cpu").eval()
    nats = 0.0
    with torch.no_grad():
        for row in rows:
            ids = [256, *row["text"].encode()]
            for start in range(1, len(ids), 128):  # the harness' windows: as many new tokens as fit, each time
                stop = min(start + 128, len(ids))
                first = max(0, stop - 129)
                logits_TV = model(torch.tensor([ids[first : stop - 1]])).logits[0].log_softmax(-1)
                targets = torch.tensor(ids[start:stop])
                nats -= float(logits_TV[start - 1 - first :].gather(1, targets[:, None]).sum())
    bits = nats / np.log(2) / sum(len(row["text"].encode()) for row in rows)
    found = scores(outcomes["untrained.json"])["python_bytes", "bits_per_byte"]["value"]
    assert found == pytest.approx(bits, rel=1e-4)


def test_results_say_what_was_evaluated_with_what(outcomes: dict[str, Any]) -> None:
    result = outcomes["trained.json"]
    assert result["export"] == {"run_id": "r-1", "round": 7, "digest": "ab"}
    assert result["versions"].keys() == {"lm_eval", "transformers"}
    assert result["task_versions"] == {"python_lines": 1.0, "python_bytes": 1.0}
    assert (result["limit"], outcomes["untrained.json"]["export"]) == (None, {})
    assert "trained" not in json.dumps(result)  # no path
    code, out, _, _ = outcomes["trained"]
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "metric", "value", "stderr", "n"]
    assert out.splitlines()[1].split()[:2] == ["python_lines", "acc"]


def test_the_card_gets_the_results(outcomes: dict[str, Any]) -> None:
    card = outcomes["trained"][3]
    assert card.endswith("---\n\n# A model\n")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "apache-2.0"
    ((name, results),) = [(entry["name"], entry["results"]) for entry in front["model-index"]]
    assert name == "r-1"
    assert [result["dataset"]["type"] for result in results] == ["python_lines", "python_bytes"]
    expected = scores(outcomes["trained.json"])["python_lines", "acc"]
    (metric,) = results[0]["metrics"]
    assert (metric["type"], metric["value"]) == ("acc", expected["value"])
    assert metric["args"] == {"stderr": expected["stderr"]}
    assert outcomes["untrained"][3] is None  # without --attach


def test_tasks_by_group_by_file_and_limited(outcomes: dict[str, Any]) -> None:
    assert outcomes["group.json"]["limit"] == 5
    counts = {task: score["num_samples"] for (task, _), score in scores(outcomes["group.json"]).items()}
    assert counts == {"python_lines": 5, "python_bytes": 5, "elsewhere": 5}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("unknown", "evaluate: unknown task 'python_line', did you mean python_lines? (--include-path adds tasks"),
        ("no file", "nothing.yaml: no such task file"),
        ("broken", "evaluate: the data of broken could not be loaded: "),
    ],
)
def test_mistakes_about_tasks(outcomes: dict[str, Any], command: str, message: str) -> None:
    code, out, err, _ = outcomes[command]
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------- without the harness


def test_what_is_not_an_export(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        check_export(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is not a transformers model: it has no config\.json"):
        check_export(tmp_path)
    model = build_model("olmoe", SETTINGS, seed=0, device="cpu")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        check_export(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        check_export(tmp_path)
    ByteTokenizer().save(tmp_path)
    check_export(tmp_path)


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = save(build_model("olmoe", SETTINGS, seed=0, device="cpu"), tmp_path / "export")
    with pytest.raises(ConfigError, match="nowhere: no such directory of tasks"):
        evaluate(export, ["python_lines"], [tmp_path / "nowhere"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # what Python does when a module cannot be imported
    with pytest.raises(UserError, match=r"not installed; run: pip install .*\[eval\]"):
        evaluate(export, ["python_lines"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: found 0, expected at least 1"),
        (["--tasks", ", "], "--tasks names no task"),
        (["--device", "tpu"], "--device: found 'tpu'"),
        (["--device", "cuda:99"], "--device: cuda:99 is not on this machine"),
        (["--output", "/nowhere/results.json"], "/nowhere/results.json: its directory does not exist"),
    ],
)
def test_command_line_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"evaluate: {message}")


EVALUATION = Evaluation(
    scores=(
        Score(task="a", metric="acc", filter="none", value=0.5, stderr=0.1, num_samples=10),
        Score(task="a", metric="acc", filter="strict", value=0.25, stderr=None, num_samples=10),
        Score(task="b", metric="bits", filter="none", value=2.0, stderr=None, num_samples=3),
    ),
    versions={},
    task_versions={},
    export={},
    limit=None,
)


@settings(max_examples=20)
@given(
    body=st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60),
    line_break=st.sampled_from(["\n", "\r\n"]),
)
@example(body="# Text\r\n---\nmodel-index: no\n---\n", line_break="\n")
def test_the_text_of_a_card_is_left_alone(tmp_path_factory: pytest.TempPathFactory, body: str, line_break: str) -> None:
    directory = tmp_path_factory.mktemp("card")
    front = line_break.join(["---", "tags: [moe, spes]", "license: mit", "---", ""])
    (directory / "README.md").write_bytes((front + body).encode())
    card = attach(EVALUATION, directory)
    written = card.read_bytes()
    front = written.removesuffix(body.encode()).decode()
    assert front.endswith(("---\n", "---\r\n"))
    data = yaml.safe_load(front.strip().strip("-"))
    assert (data["tags"], data["license"]) == (["moe", "spes"], "mit")
    attach(EVALUATION, directory)
    assert card.read_bytes() == written


def test_only_the_same_measurements_are_replaced(tmp_path: Path) -> None:
    other = {
        "task": {"type": "text-generation", "name": "Reading"},
        "dataset": {"type": "c", "name": "See", "split": "test"},
        "metrics": [{"type": "f1", "value": 0.75, "name": "F1"}],
        "source": {"name": "somebody", "url": "https://example.org"},
    }
    front = {"model-index": [{"name": "mine", "results": [other]}]}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\ntext\n")
    attach(EVALUATION, tmp_path)
    better = replace(EVALUATION, scores=(replace(EVALUATION.scores[0], value=0.9, stderr=0.01, num_samples=20),))
    card = attach(better, tmp_path).read_text()
    (entry,) = yaml.safe_load(card.split("---\n")[1])["model-index"]
    assert entry["name"] == "mine"
    assert other in entry["results"]
    values = [
        (result["dataset"]["type"], metric["type"], metric.get("config"), metric["value"])
        for result in entry["results"]
        for metric in result["metrics"]
    ]
    assert sorted(values, key=str) == [
        ("a", "acc", "strict", 0.25),
        ("a", "acc", None, 0.9),
        ("b", "bits", None, 2.0),
        ("c", "f1", None, 0.75),
    ]


@pytest.mark.parametrize("front", ["[1, 2]", "model-index: 3", "model-index: [{results: []}]", "a: [", "b: {c: d"])
def test_a_card_that_cannot_be_read_is_left_alone(tmp_path: Path, front: str) -> None:
    content = f"---\n{front}\n---\ntext\n"
    (tmp_path / "README.md").write_text(content)
    with pytest.raises(CheckpointError, match=r"README\.md: its front matter cannot be read"):
        attach(EVALUATION, tmp_path)
    assert (tmp_path / "README.md").read_text() == content


def test_the_data_of_the_local_tasks() -> None:
    questions = [json.loads(line) for line in (TASKS / "python_lines.jsonl").read_text().splitlines()]
    assert len({(row["context"], *row["choices"]) for row in questions}) == 200
    for row in questions:
        assert len(set(row["choices"])) == 4
        assert len({tuple(sorted(choice)) for choice in row["choices"]}) == 1  # only the order differs
        assert all(len(row["context"] + choice) < 128 for choice in row["choices"])
    assert [sum(row["answer"] == place for row in questions) for place in range(4)] == [50] * 4
    assert sum(path.stat().st_size for path in TASKS.iterdir() if path.is_file()) < 100_000


def test_variables_of_a_launcher_are_named_and_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With WORLD_SIZE, accelerate waits for processes that nobody starts."""
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    _be_one_process()
    assert not {"WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys()
    assert "it ignores WORLD_SIZE, RANK, OMPI_COMM_WORLD_SIZE in the environment" in capsys.readouterr().err
