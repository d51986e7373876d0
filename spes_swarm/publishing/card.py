"""The model card (README.md) of a publication: what was trained on which data, how far, and how to use and join it.

Names come from peers and configurations. None of them may become markup: a library writes the YAML, and characters with
a meaning in Markdown or HTML are escaped. A card contains no paths, and only the addresses that its publisher gives.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from spes_swarm.base.decoding import StrictModel, first_complaint
from spes_swarm.base.errors import DataError, UserError
from spes_swarm.base.names import clean_name
from spes_swarm.base.wording import amount, loss_with_error, plural
from spes_swarm.config.join_command import data_arguments, describe_data, join_command
from spes_swarm.config.run import RunConfig
from spes_swarm.publishing.publication import CARD_FILE, PICTURE_FILE, Count, LossPoint, NotNegative, Publication
from spes_swarm.publishing.target import round_tag

_MAX_ROWS = 100
_MARKUP = re.compile(r"([*_~#+\-.!(){}=^:@/])")
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}")
_DOTS_PER_INCH = 120


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card states beyond the publication itself; all of it comes from the publisher."""

    repository: str | None = None  # USER/REPO; None: a directory
    license: str | None = None  # an identifier of the Hub, e.g. apache-2.0
    base_model: str | None = None  # USER/REPO of the base of an upcycled model
    data: str | None = None  # what it was trained on, in words
    contributors: Sequence[Contributor] = ()
    join_address: str | None = None  # a peer's multiaddress that may be made public


def write_card(directory: Path, publication: Publication, facts: CardFacts) -> None:
    """Writes the card and, where matplotlib is installed, the loss curve.

    Raises:
        UserError: a fact is invalid.
        OSError: the directory cannot be written.
    """
    picture = draw_losses(publication.history, directory / PICTURE_FILE)
    (directory / CARD_FILE).write_text(card(publication, facts, picture), encoding="utf-8")


def escape(text: str) -> str:
    """Returns untrusted text as one line that Markdown and HTML render literally."""
    return _MARKUP.sub(r"\\\1", clean_name(text))


def card(publication: Publication, facts: CardFacts, picture: bool) -> str:
    """Returns the card's text.

    Raises:
        UserError: a fact is invalid.
    """
    run = publication.manifest.run
    sections = [
        _front_matter(run, facts),
        _introduction(publication, facts),
        _progress(publication, picture),
        _loading(publication, facts),
        _joining(publication, facts),
        _contributors(facts.contributors),
        _provenance(publication),
    ]
    return "\n".join(section for section in sections if section)


def _front_matter(run: RunConfig, facts: CardFacts) -> str:
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-experts", "spes-swarm", "decentralized-training", run.model.type],
    }
    for key, value in (("license", facts.license), ("base_model", facts.base_model)):
        if value is None:
            continue
        if not _IDENTIFIER.fullmatch(value):
            raise UserError(f"{key.replace('_', '-')} {value!r:.80}: expected a Hub identifier")
        fields[key] = value
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _introduction(publication: Publication, facts: CardFacts) -> str:
    run = publication.manifest.run
    origin = (
        f", upcycled from [{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else ""
    )
    words = facts.data or (describe_data(run.data) if run.data.kind else "")
    data = f" on {escape(words)}" if words else ""
    return (
        f"# {escape(run.name)}\n\n"
        f"A Mixture-of-Experts language model ({escape(run.model.type)}, {plural(run.model.num_experts, 'expert')}, "
        f"{run.model.experts_per_token} for each token{origin}), trained{data} by volunteers without a server, with "
        "[SPES](https://arxiv.org/abs/2602.11543): each peer trains the shared layers and some of the experts.\n"
    )


def _progress(publication: Publication, picture: bool) -> str:
    total = publication.manifest.run.training.total_steps
    steps = f"{publication.steps:,} of {total:,}"
    if publication.steps > total:
        steps = f"{publication.steps:,}; the schedule ended at {total:,}"
    rows = [("round", f"{publication.round:,}"), ("inner steps", steps)]
    if publication.tokens is not None:
        rows.append(("tokens", f"{publication.tokens:,}"))
    if publication.peers is not None:
        rows.append(("peers in this round", f"{publication.peers:,}"))
    if publication.history:
        last = publication.history[-1]
        error = "" if last.stderr is None else " (standard error)"
        after = "" if last.round == publication.round else f" after round {last.round:,}"
        rows.append(("loss on held-out text", f"{loss_with_error(last.loss, last.stderr)}{error}{after}"))
    image = f"\n![Loss on held-out text]({PICTURE_FILE})\n" if picture else ""
    return "## Progress\n\n| | |\n|---|---|\n" + "".join(f"| {k} | {v} |\n" for k, v in rows) + image


def _loading(publication: Publication, facts: CardFacts) -> str:
    name, revision = facts.repository or "PATH_OF_THIS_DIRECTORY", round_tag(publication.round)
    pinned = f', revision="{revision}"' if facts.repository else ""
    return (
        "## Use it\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{pinned})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{pinned})\n'
        'inputs = tokenizer("def main", return_tensors="pt", return_token_type_ids=False)\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))\n```\n"
        + ("\nEvery published round has a tag: leave `revision` out for the newest.\n" if facts.repository else "")
        + f"\nIt was written with transformers {version('transformers')}. Version 4 loads it, too, if it knows the "
        f"architecture `{publication.manifest.run.model.type}`.\n"
    )


def _joining(publication: Publication, facts: CardFacts) -> str:
    data = publication.manifest.run.data
    who = "Anyone can, with spes_swarm and the address of one peer"
    if publication.manifest.run.admission != "open":
        who = "The run is private: its members can, and those whom they invite (`--invitation`)"
    text = f"## Take part\n\n{who}:\n\n```bash\n"
    address = " ".join(facts.join_address.split()) if facts.join_address else "ADDRESS_OF_A_PEER"
    if "`" in address:
        raise UserError("the join address is not a multiaddress")
    text += f"{join_command(publication.run_id, data, address)}\n```\n"
    named = data_arguments(data)
    source = facts.repository or "PUBLICATION"
    where = "this repository" if facts.repository else "its publication, `USER/REPO` or `file:DIRECTORY`"
    return text + (
        f"\nTo continue the run when no peers are left, start from {where}:\n\n"
        f"```bash\n{shlex.join(['python', '-m', 'spes_swarm.join', '--from-hub', source, *named])}\n```\n"
    )


def _contributors(contributors: Sequence[Contributor]) -> str:
    if not contributors:
        return ""
    ranked = sorted(contributors, key=lambda c: (-c.tokens, c.name))
    rows = [f"| {escape(c.name) or 'anonymous'} | {c.tokens:,} |\n" for c in ranked[:_MAX_ROWS]]
    rest = ranked[_MAX_ROWS:]
    if rest:
        rows.append(f"| {len(rest)} more | {sum(c.tokens for c in rest):,} |\n")
    return "## Contributors\n\n| peer | tokens |\n|---|---:|\n" + "".join(rows)


def _provenance(publication: Publication) -> str:
    return (
        "## Provenance\n\n"
        f"Run `{publication.run_id}` (configuration {publication.manifest.run.digest[:16]}), founded by "
        f"`{publication.manifest.founder}`. Reference `{publication.digest}`. `spes_swarm.json` has the run's signed "
        "description and the digest of every block and file.\n"
    )


def draw_losses(history: Sequence[LossPoint], path: Path) -> bool:
    """Draws the eval loss. Returns False if there are fewer than two points or matplotlib is missing.

    Raises:
        OSError: the picture cannot be written.
    """
    if len(history) < 2:
        return False
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        return False
    by_tokens = all(point.tokens is not None for point in history)
    xs = [point.tokens if by_tokens else point.round for point in history]
    figure = Figure(figsize=(7.0, 3.6), dpi=_DOTS_PER_INCH, layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(xs, [point.loss for point in history], color="#0072B2", linewidth=1.6)
    axes.set_xlabel("tokens" if by_tokens else "round")
    axes.set_ylabel("loss on held-out text")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(max(value, 0))))
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    return True


_MAX_RESULTS_BYTES = 8 << 20
_MAX_NAME_CHARS = 200


class Contributor(StrictModel):
    """A peer whose owner has agreed to be named."""

    name: Annotated[str, Field(max_length=_MAX_NAME_CHARS)]
    tokens: Count  # trained on in this run


class Results(StrictModel):
    """What is known about a run: the content of the file given to `--results`."""

    tokens: Count | None = None  # trained on by all peers together
    peers: Count | None = None  # that took part in the newest round
    history: list[LossPoint] = Field(default_factory=list)
    contributors: list[Contributor] = Field(default_factory=list)


def read_results(path: Path) -> Results:
    """Reads the file given to `--results`.

    Raises:
        DataError: the file cannot be read, or is invalid.
    """
    try:
        if path.stat().st_size > _MAX_RESULTS_BYTES:
            raise DataError("--results: the file is too large")
        return Results.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise DataError(f"--results: {exc.strerror}") from exc
    except ValidationError as exc:
        raise DataError(f"--results: {first_complaint(exc)}") from exc


def _if_valid(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    with suppress(ValidationError):
        return validate(value)
    return None


_IfValid = WrapValidator(_if_valid)


class _RoundEvent(StrictModel, extra="ignore"):
    """What is used of a `round` event in `metrics.jsonl`; a figure that makes no sense is None."""

    event: Literal["round"]
    round: Count
    eval_loss: Annotated[NotNegative | None, _IfValid] = None
    eval_loss_stderr: Annotated[NotNegative | None, _IfValid] = None
    peers: Annotated[Count | None, _IfValid] = None
    swarm_tokens: Annotated[Count | None, _IfValid] = None


def results_of_metrics(path: Path, round_number: int) -> Results:
    """Reads the eval losses up to a round, and the number of its peers, from a peer's `metrics.jsonl`.

    Unreadable lines, figures that make no sense and a missing file are ignored: nothing depends on them.
    """
    points: dict[int, LossPoint] = {}
    peers: int | None = None
    for event in _round_events(path):
        if event.round <= round_number and event.eval_loss is not None:
            points[event.round] = LossPoint(
                round=event.round, tokens=event.swarm_tokens, loss=event.eval_loss, stderr=event.eval_loss_stderr
            )
        if event.round == round_number and event.peers is not None:
            peers = event.peers
    return Results(peers=peers, history=[points[number] for number in sorted(points)])


def _round_events(path: Path) -> Iterator[_RoundEvent]:
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"round"' in line:  # others are of other events
                with suppress(ValidationError):
                    yield _RoundEvent.model_validate_json(line)
