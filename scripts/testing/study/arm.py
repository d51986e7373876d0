"""What a study compares: arms, read from YAML.

A file has defaults for all arms (the fields of `ArmConfig`), the questions of the study (`StudyConfig`), and `arms`, a
section of such fields for each name. An arm may be `like` one above it; what it sets is then added to that:

    base: quickstart-paper
    peers: 4
    steps: 300
    seeds: [0, 1, 2]
    lone_steps: [300, 600, 1200]
    baseline: H 20
    set: {training.batch_size: 4}
    arms:
      H 20: {set: {round.inner_steps: 20}}
      H 5: {set: {round.inner_steps: 5}}
      H 5, int4: {like: H 5, set: {round.codec: int4}}
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from scripts.testing.paper_config import paper_config_path
from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Pattern, Range, Section, nearest, read_section, show
from spes_swarm.base.strict_yaml import load_yaml
from spes_swarm.config.constraints import Count, CountOrZero, Fraction, Positive, Seed, Setting, Text
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.protocol.consensus.codec import CODECS

PAPER_QUICKSTART = "quickstart-paper"


@dataclass(kw_only=True, slots=True, frozen=True)
class ChurnConfig(Section):
    """Peers that are replaced by newcomers."""

    share: Fraction = 0.0  # of the peers, replaced at a time; fractions of a peer add up. 0: nobody leaves
    every_rounds: Count = 10
    absent_rounds: CountOrZero = 0  # rounds that a place stays empty
    sudden: bool = False  # they die before a round, and their work since the last one is lost; else they leave with it


@dataclass(kw_only=True, slots=True, frozen=True)
class OuterConfig(Section):
    """Nesterov momentum on the reference (DiLoCo, arXiv 2311.08105)."""

    learning_rate: Positive = 0.7
    momentum: Annotated[float, Range(0, 0.999)] = 0.9


@dataclass(kw_only=True, slots=True, frozen=True)
class ArmConfig(Section):
    """One arm.

    `mode` is one of:
        swarm: every peer trains the shared layers and the experts that it holds;
        fedavg: every peer trains everything;
        diloco: the same, with an outer optimiser of the reference;
        central: one process with the batches of all peers;
        lone: one peer with its own batches only.
    """

    mode: Annotated[str, Pattern(r"swarm|fedavg|diloco|central|lone", "swarm, fedavg, diloco, central or lone")] = (
        "swarm"
    )
    set: dict[str, Setting] = field(default_factory=dict)  # settings of the run by dotted key, without `run.`
    peers: Count = 4
    steps: Count = 300  # of each peer; the learning rate's schedule ends with them unless `set` says otherwise
    # iid: every peer draws from all text; shards: each from its own part of it (text of another kind).
    data: Annotated[str, Pattern(r"iid|shards", "iid or shards")] = "iid"
    speeds: tuple[Positive, ...] = ()  # relative, of the peers in turn; empty: equal. The mean peer does all steps
    # Codec in which peers average Muon's momentum after each round; None: each keeps its own.
    share_momentum: Annotated[str, Pattern("|".join(CODECS), f"one of {', '.join(CODECS)}")] | None = None
    churn: ChurnConfig = field(default_factory=ChurnConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)  # of mode diloco

    def _check(self) -> None:
        if len(self.speeds) > self.peers:
            raise ConfigError(f"speeds: found {len(self.speeds)} of them, expected at most {self.peers} (peers)")
        if self.churn.share > 0 and self.mode != "swarm":
            raise ConfigError(f"churn: found with mode {self.mode}, expected mode swarm")


@dataclass(kw_only=True, slots=True, frozen=True)
class StudyConfig(Section):
    """What is asked of all arms."""

    # Configuration file whose `run:` section the arms change; `quickstart-paper` is inside the package.
    base: Text = PAPER_QUICKSTART
    seeds: tuple[Seed, ...] = (0, 1, 2)  # of weights, data and held-out split
    baseline: Text | None = None  # the arm that others are compared with, seed by seed; None: the first
    bytes_of: Text | None = None  # the arm whose bytes per step and peer are 1; None: the baseline
    # Lengths of the lone runs that give the steps which a lone peer needs for the same loss; empty: no efficiency.
    lone_steps: tuple[Count, ...] = ()
    # Settings that these lone runs have instead of the arm's, such as a learning rate that is best for a lone peer.
    lone_set: dict[str, Setting] = field(default_factory=dict)
    evaluations: Count = 10  # of each run, evenly spaced; the last one is at its end

    def _check(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: found {list(self.seeds)}, expected at least one, each once")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm whose settings have been checked; its seed is still to be set."""

    name: str
    config: ArmConfig
    run: RunConfig

    def with_seed(self, seed: int) -> RunConfig:
        """Returns the settings of one run."""
        values = self.run.to_dict()
        values["training"]["seed"] = seed
        return RunConfig.from_dict(values, self.name)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A file of arms."""

    config: StudyConfig
    arms: tuple[Arm, ...]
    # For each arm but lone ones its lone peers, in the order of `lone_steps`; arms that learn alike share them.
    lone: Mapping[str, tuple[Arm, ...]]

    @property
    def baseline(self) -> str:
        """Name of the arm that others are compared with."""
        return self.config.baseline or self.arms[0].name

    @property
    def bytes_of(self) -> str:
        """Name of the arm whose bytes are 1."""
        return self.config.bytes_of or self.baseline


# What a lone peer shares with an arm: the method of the swarm (rounds, ownership) is what it is compared with.
_OF_LEARNING = ("model", "tokenizer", "training", "evaluation")


def read_study(path: str | Path) -> Study:
    """Reads a file of arms.

    Raises:
        ConfigError: naming the file, the key, what was found and what is expected.
    """
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {show(content)}, expected a section of keys")
    arms = content.pop("arms", None)
    if not isinstance(arms, dict) or not arms:
        found = "none" if arms == {} else show(arms)
        raise ConfigError(f"{path}: arms: found {found}, expected a section with a key for each arm")
    of_arms, of_study = ({each.name for each in fields(cls)} for cls in (ArmConfig, StudyConfig))
    for key in content:
        if key not in of_arms | of_study:
            raise ConfigError(f"{path}: {key}: unknown key{nearest(str(key), [*of_arms, *of_study, 'arms'])}")
    config = _section(StudyConfig, {key: value for key, value in content.items() if key in of_study}, path, "")
    defaults = {key: value for key, value in content.items() if key in of_arms}
    for key in ("baseline", "bytes_of"):
        if (name := getattr(config, key)) is not None and name not in arms:
            raise ConfigError(f"{path}: {key}: found {show(name)}, expected the name of an arm")
    base = load_config(paper_config_path() if config.base == PAPER_QUICKSTART else config.base).run
    if base is None:
        raise ConfigError(f"{path}: base: {config.base} has no `run:` section")
    shared = _section(ArmConfig, defaults, path, "").set
    read = [_read_arm(path, str(name), values, base) for name, values in _resolve(path, arms, defaults).items()]
    lone = {
        arm.name: tuple(_lone(arm, steps, base, shared, config.lone_set) for steps in config.lone_steps)
        for arm in read
        if arm.config.mode != "lone"
    }
    return Study(config=config, arms=tuple(read), lone=lone)


def _section(cls: type[Any], values: Any, path: str | Path, key: str) -> Any:
    """As read_section; the file itself is a section without a key."""
    try:
        return read_section(cls, values, "", key or "file")
    except ConfigError as exc:
        raise ConfigError(f"{path}: {str(exc).removeprefix('file.')}") from None


def _resolve(path: str | Path, arms: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of each arm, with those of the arm that it is `like`, or of the defaults, below them."""
    resolved: dict[str, dict[str, Any]] = {}
    for name, content in arms.items():
        own = {} if content is None else content
        if not isinstance(own, dict):
            raise ConfigError(f"{path}: arms.{name}: found {show(own)}, expected a section of keys")
        below = defaults
        if "like" in own:
            if not isinstance(like := own["like"], str) or like not in resolved:
                raise ConfigError(f"{path}: arms.{name}.like: found {show(like)}, expected the name of an arm above")
            below = resolved[like]
        values = {**below, **{key: value for key, value in own.items() if key != "like"}}
        settings = [each.get("set", {}) for each in (below, own)]
        if all(isinstance(each, dict) for each in settings):
            values["set"] = {**settings[0], **settings[1]}
        resolved[str(name)] = values
    return resolved


def _read_arm(path: str | Path, name: str, values: Mapping[str, Any], base: RunConfig) -> Arm:
    key = f"arms.{name}"
    config = _section(ArmConfig, values, path, key)
    run = _build_run(base, config, f"{path}: {key}.set")
    if config.share_momentum is not None and run.training.optimiser != "muon":
        raise ConfigError(f"{path}: {key}.share_momentum: found with optimiser {run.training.optimiser}, expected muon")
    return Arm(name=name, config=config, run=run)


def _build_run(base: RunConfig, config: ArmConfig, where: str) -> RunConfig:
    values = base.to_dict()
    training = values["training"]
    training["total_steps"] = config.steps
    training["at_end"] = "stop"  # so the last round leaves no work behind
    training["warmup_steps"] = min(training["warmup_steps"], config.steps // 2)
    for key, value in config.set.items():
        *sections, last = key.split(".")
        section: Any = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: {key}: unknown key{nearest(key, _dotted(values))}")
        section[last] = deepcopy(value)
    try:
        return RunConfig.from_dict(values, where)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace(f"{where}: run.", f"{where}: ", 1)) from None


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, value in values.items():
        names += _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return names


def _lone(arm: Arm, steps: int, base: RunConfig, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Arm:
    """Returns the lone peer that an arm is compared with, over this many steps."""
    chosen = {key: value for key, value in arm.config.set.items() if key.split(".")[0] in _OF_LEARNING}
    chosen.pop("training.total_steps", None)
    config = ArmConfig(mode="lone", peers=1, steps=steps, set={**shared, **chosen, **own})
    name = f"lone peer of {arm.name}, {steps} steps"
    return Arm(name=name, config=config, run=_build_run(base, config, f"{name} (lone_set)" if own else name))
