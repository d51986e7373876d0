"""Evaluates an export with lm-evaluation-harness, and puts the figures into its model card.

The harness is an optional dependency and takes seconds to import, so that happens inside functions.
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

CARD_FILE = "README.md"
# Written beside an export by whoever publishes it: which reference of which run it is.
EXPORT_FILE = "spes_swarm.json"
_EXPORT_KEYS = ("run_id", "round", "digest")
_TASK_TYPE = "text-generation"  # what the Hub calls the task of a language model
_MODEL_INDEX = "model-index"


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    filter: str  # how the harness read the answers; "none" where there is nothing to read
    value: float
    stderr: float | None  # None where the harness estimates none
    num_samples: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, with what, and of what."""

    scores: tuple[Score, ...]
    versions: Mapping[str, str]  # of lm_eval and transformers
    task_versions: Mapping[str, Any]
    export: Mapping[str, Any]  # run_id, round and digest, as far as the export says them
    limit: int | None  # samples per task, if it was limited

    def to_json(self) -> str:
        """JSON text; no path and nothing else about this machine."""
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
    """Runs tasks of the harness on a model directory.

    Args:
        export: with config.json, safetensors and a tokenizer; no code of its own is run.
        tasks: names, tags or groups that the harness knows, or paths of YAML files.
        include_paths: directories with further tasks. Task files may name Python functions, which are run.
        limit: only the first so many samples of each task.
        batch_size: sequences at a time.
        device: of torch.

    Raises:
        CheckpointError: the directory is not an export.
        ConfigError: an unknown task, or a directory of tasks that does not exist.
        DataError: the data of a task cannot be had.
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
        # An absolute path cannot be taken for a name on the Hub.
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
    """Refuses what is not a model with its tokenizer.

    Raises:
        CheckpointError: saying what is missing.
    """
    read_config(directory)
    with WeightDirectory(directory):
        pass  # the headers can be read
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(f"{directory} has no tokenizer; export the run again, or copy its tokenizer files")


def attach(evaluation: Evaluation, directory: Path) -> Path:
    """Puts the scores into the front matter of the model card, as the Hub's `model-index`.

    The scores of the same tasks and metrics are replaced, all others and the rest of the card are kept. Without a
    card, one is made that consists of the front matter only.

    Returns:
        The card.

    Raises:
        CheckpointError: the card's front matter cannot be read.
    """
    card = directory / CARD_FILE
    try:
        data = (metadata_load(card) if card.is_file() else None) or {}
        name, kept = model_index_to_eval_results(data[_MODEL_INDEX]) if data.get(_MODEL_INDEX) else ("", [])
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{card}: its front matter cannot be read; mend it, or remove {_MODEL_INDEX}") from exc
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
    """What an evaluation measured, apart from how exactly and with what outcome."""
    return (result.task_type, result.dataset_type, result.metric_type, result.metric_config)


def _task_manager(tasks: Sequence[str], include_paths: Sequence[Path]) -> Any:
    """The harness' index of tasks; with its own thousands, which take seconds to read, only when they are needed."""
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
    """The groups, and the tasks in none of them, with their data, which for most comes from the Hub."""
    try:
        loaded = manager.load(list(tasks))
    # What datasets, the Hub client and a task's own functions raise has no common base.
    except Exception as exc:
        reason = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise DataError(f"the data of {', '.join(tasks)} could not be loaded: {reason}") from exc
    inner = {name for children in loaded["group_map"].values() for name in children}
    return [item for kind in ("groups", "tasks") for name, item in loaded[kind].items() if name not in inner]


def _scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """The harness writes a metric as `name,filter` and its standard error as `name_stderr,filter`."""
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
                    # In a group, not every task need have the metric.
                    num_samples=values.get("sample_count", {}).get(key, values["sample_len"]),
                )
            )
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _identity(export: Path) -> dict[str, Any]:
    """Which reference of which run this is, as far as the export says it."""
    try:
        content = json.loads((export / EXPORT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{export / EXPORT_FILE} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{export / EXPORT_FILE} is not a JSON object")
    return {key: content[key] for key in _EXPORT_KEYS if isinstance(content.get(key), str | int)}
