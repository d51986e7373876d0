"""Evaluates an export with lm-evaluation-harness, and adds the scores to its model card.

The harness is an optional dependency and takes seconds to import, so functions import it when needed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard import metadata_load, metadata_save
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from spes_swarm.base.errors import CheckpointError, ConfigError, DataError, UserError
from spes_swarm.base.strict import nearest
from spes_swarm.model.initial_weights import WeightDirectory, read_config
from spes_swarm.publishing.publication import CARD_FILE, PUBLICATION_FILE

LOCAL_TASKS = Path(__file__).parent / "tasks"  # their data comes with this package
_EXPORT_KEYS = ("run_id", "round", "digest")  # of the publication manifest
_TASK_TYPE = "text-generation"  # the Hub's name for the task of a language model
_MODEL_INDEX = "model-index"


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    filter: str  # how the harness extracted the answers; "none" if it did not
    value: float
    stderr: float | None  # None if the harness does not estimate it
    num_samples: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of an export, and how they were measured."""

    scores: tuple[Score, ...]
    versions: Mapping[str, str]  # of lm_eval and transformers
    task_versions: Mapping[str, Any]
    export: Mapping[str, Any]  # run_id, round and digest, as far as the export records them
    limit: int | None  # samples per task, if limited

    def to_json(self) -> str:
        """Returns JSON text, without paths or anything else about this machine."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def evaluate(
    export: Path,
    tasks: Sequence[str],
    include_paths: Sequence[Path] = (),
    *,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
) -> Evaluation:
    """Runs tasks of the harness (names, tags, groups, or YAML files) on a model directory, whose code is never run.

    Task files in `include_paths` may name Python functions, which are run. `limit` is a number of samples of each task.

    Raises:
        CheckpointError: the directory is not an export.
        ConfigError: an unknown task, or a directory of tasks that does not exist.
        DataError: the data of a task cannot be loaded.
        UserError: the harness is not installed.
    """
    check_export(export)
    for path in include_paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such directory of tasks")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed; run: pip install 'spes-swarm[eval]'")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval import simple_evaluate

    manager = _task_manager(tasks, include_paths)
    results = simple_evaluate(
        model="hf",
        # An absolute path cannot be mistaken for a name on the Hub.
        model_args={"pretrained": str(export.resolve()), "use_safetensors": True, "trust_remote_code": False},
        tasks=_loaded(manager, tasks),
        task_manager=manager,
        limit=limit,
        batch_size=batch_size,
        device=device,
        log_samples=False,
    )
    return Evaluation(
        scores=tuple(_scores(results["results"])),
        versions={name: version(name) for name in ("lm_eval", "transformers")},
        task_versions=dict(results["versions"]),
        export=_identity(export),
        limit=limit,
    )


def check_export(directory: Path) -> None:
    """Refuses a directory that is not a model with its tokenizer.

    Raises:
        CheckpointError: the message says what is missing.
    """
    read_config(directory)
    with WeightDirectory(directory):
        pass  # the headers can be read
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(f"{directory} has no tokenizer; export the run again, or copy its tokenizer files")


def attach(evaluation: Evaluation, directory: Path) -> Path:
    """Adds the scores to the front matter of the model card, as the Hub's `model-index`; returns the card's path.

    Scores of the same tasks and metrics are replaced; all others and the rest of the card are kept. If there is no
    card, one is created with the front matter only.

    Raises:
        CheckpointError: the card's front matter cannot be read.
    """
    card = directory / CARD_FILE
    try:
        data = (metadata_load(card) if card.is_file() else None) or {}
        name, kept = model_index_to_eval_results(data[_MODEL_INDEX]) if data.get(_MODEL_INDEX) else ("", [])
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{card}: its front matter cannot be read; fix it, or remove {_MODEL_INDEX}") from exc
    new = [_card_result(score) for score in evaluation.scores]
    replaced = {_key(result) for result in new}
    results = [result for result in kept if _key(result) not in replaced] + new
    model_name = name or str(evaluation.export.get("run_id", directory.resolve().name))
    data[_MODEL_INDEX] = eval_results_to_model_index(model_name, results)
    metadata_save(card, data)
    return card


def _card_result(score: Score) -> EvalResult:
    return EvalResult(
        task_type=_TASK_TYPE,
        dataset_type=score.task,
        dataset_name=score.task,
        dataset_args={"num_samples": score.num_samples},
        metric_type=score.metric,
        metric_name=score.metric,
        metric_config=None if score.filter == "none" else score.filter,
        metric_args=None if score.stderr is None else {"stderr": score.stderr},
        metric_value=score.value,
    )


def _key(result: EvalResult) -> tuple[Any, ...]:
    """Identifies what was measured, without the number of samples and the outcome."""
    return (result.task_type, result.dataset_type, result.metric_type, result.metric_config)


def _task_manager(tasks: Sequence[str], include_paths: Sequence[Path]) -> Any:
    """Returns an index of tasks, with the harness's own thousands, which take seconds to read, only if needed."""
    from lm_eval.tasks import TaskManager

    files = {task for task in tasks if task.endswith((".yaml", ".yml"))}
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{file}: no such task file")
    directories = [str(path) for path in include_paths]
    own = TaskManager(include_path=directories, include_defaults=False)
    if set(tasks) <= {*own.all_subtasks, *own.all_tags}:  # a group may consist of any tasks
        return own
    manager = TaskManager(include_path=directories)
    for task in tasks:
        if task not in files and task not in manager.all_tasks:
            suggestion = nearest(task, manager.all_tasks)
            raise ConfigError(f"unknown task {task!r}{suggestion} (--include-path adds tasks of your own)")
    return manager


def _loaded(manager: Any, tasks: Sequence[str]) -> list[Any]:
    """Loads the groups, and the tasks in no group, with their data, most of which comes from the Hub."""
    try:
        loaded = manager.load(list(tasks))
    # The exceptions of datasets, the Hub client and a task's own functions have no common base.
    except Exception as exc:
        reason = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise DataError(f"the data of {', '.join(tasks)} could not be loaded: {reason}") from exc
    inner = {name for children in loaded["group_map"].values() for name in children}
    return [item for kind in ("groups", "tasks") for name, item in loaded[kind].items() if name not in inner]


def _scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Extracts scores: the harness writes a metric as `name,filter` and its standard error as `name_stderr,filter`."""
    scores = []
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr = values.get(f"{metric}_stderr,{filter_name}", "N/A")
            scores.append(
                Score(
                    task=task,
                    metric=metric,
                    filter=filter_name,
                    value=float(value),
                    stderr=float(stderr) if _is_number(stderr) else None,
                    # In a group, not every task has the metric.
                    num_samples=values.get("sample_count", {}).get(key, values["sample_len"]),
                )
            )
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _identity(export: Path) -> dict[str, Any]:
    """Returns the run and the reference of an export, as far as it records them."""
    try:
        content = json.loads((export / PUBLICATION_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{export / PUBLICATION_FILE} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{export / PUBLICATION_FILE} is not a JSON object")
    return {key: content[key] for key in _EXPORT_KEYS if isinstance(content.get(key), str | int)}
