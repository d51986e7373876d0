"""Command lines: words that are no flags, and what the help says."""

from __future__ import annotations

import importlib
import re

import pytest

from scripts import reference
from scripts.flags_reference import COMMAND, PAGE, build_page
from spes_swarm.config.command_line import flags_of
from spes_swarm.config.file import setting_keys
from spes_swarm.config.peer import PeerConfig
from spes_swarm.join import parse_arguments
from tests.helpers.repository import ROOT

COMMANDS = ["join", "plan", "monitor.__main__", "publish", "export", "tokenize", "upcycle", "evaluate"]


def outcome(capsys: pytest.CaptureFixture[str], module: str, *arguments: str) -> tuple[int, str, str]:
    try:
        code = importlib.import_module(f"spes_swarm.{module}").main(list(arguments))
    except SystemExit as exc:  # --help
        code = exc.code
    return code, *capsys.readouterr()


def mistake(capsys: pytest.CaptureFixture[str], module: str, *arguments: str) -> str:
    code, stdout, stderr = outcome(capsys, module, *arguments)
    assert (code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    return line.partition(": ")[2]


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("join --ouput-dir runs/me", "--output-dir"),
        ("join --ouput-dir=runs/me", "--output-dir"),
        ("join --output_dir runs/me", "--output-dir"),
        ("join -output-dir runs/me", "--output-dir"),
        ("join \u2014output-dir runs/me", "--output-dir"),  # pasted from a page that made one dash of two hyphens
        ("join --Max-Rounds 3", "--max-rounds"),
        ("join --peer.num_threads 1", "--num-threads"),
        ("join --bootstrap-timeout-s 15", "--bootstrap-timeout"),
        ("join --batch-sze x", "--batch-size"),
        ("join --max-rounds x --ouput-dir y", "--output-dir"),  # the unknown flag comes first
        ("plan --host-memroy 3GB", "--host-memory"),
        ("tokenize text --ouput tokens", "--output"),  # and before the flag that is missing for that reason
        ("publish runs/me --too you/model", "--to"),
        ("monitor.__main__ --inital-peers x", "--initial-peers"),
        ("evaluate model --limt 3", "--limit"),
        ("export a b --max-shardsize 1GB", "--max-shard-size"),
        ("upcycle a b --topk 2", "--top-k"),
    ],
)
def test_a_flag_with_a_typing_error(capsys: pytest.CaptureFixture[str], command: str, meant: str) -> None:
    line = mistake(capsys, *command.split())
    assert re.fullmatch(rf"unknown flag \S+, did you mean {meant}\?", line)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("join --learning-rate 3", "set run.training.learning_rate in a configuration, see --config"),
        ("join --training.learning_rate 3", "set run.training.learning_rate in a configuration, see --config"),
        ("join --learning-rates 3", "set run.training.learning_rate in a configuration, see --config"),
        ("join --num-experts 3", "set run.model.settings.num_experts in a configuration, see --config"),
        ("plan --seed 3", "set run.training.seed or peer.seed in a configuration, see --config"),
        (
            "tokenize --learning-rate 3",
            "set run.training.learning_rate in a configuration, see --config of python -m spes_swarm.join",
        ),
    ],
)
def test_a_setting_given_as_a_flag(capsys: pytest.CaptureFixture[str], command: str, advice: str) -> None:
    assert mistake(capsys, *command.split()) == f"unknown flag {command.split()[1]}; {advice}"


def test_every_setting_given_as_a_flag_leads_to_its_key_or_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    _, usage, _ = outcome(capsys, "join", "--help")
    flags = set(re.findall(r"--[a-z-]+", usage))
    for key in setting_keys():
        flag = "--" + key.rpartition(".")[2].replace("_", "-")
        if flag in flags:
            continue
        line = mistake(capsys, "join", flag, "1")
        renamed = re.search("did you mean --(bootstrap-timeout|profile)[?]", line)
        assert key in line or renamed or line.count(" or ") == 2


def test_a_setting_of_a_peer_at_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "plan", "--num-threads", "1")
    assert line == "--num-threads is not a flag of this command; see python -m spes_swarm.join --help"
    assert "num_threads" in PeerConfig().to_dict()


@pytest.mark.parametrize(
    "words", [["--foo"], ["--lr", "1"], ["-x"], ["--name", "--foo"], ["--seed", "x", "--" + 60 * "y"]]
)
def test_what_resembles_nothing(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    unknown = next(word for word in words[::-1] if word.startswith("-"))
    assert mistake(capsys, "join", *words) == f"unknown flag {unknown}; see --help"


def test_other_mistakes_are_those_of_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "join", "extra") == "unrecognized arguments: extra; see --help"
    assert "invalid int value: 'x'" in mistake(capsys, "join", "--max-round", "x")  # an abbreviation
    assert "the following arguments are required: --output" in mistake(capsys, "tokenize", "text")
    assert "unrecognized arguments: " in mistake(capsys, "join", "--", "--learning-rate")


@pytest.mark.parametrize("module", COMMANDS)
def test_help_names_no_default_that_only_means_not_given(capsys: pytest.CaptureFixture[str], module: str) -> None:
    code, text, _ = outcome(capsys, module, "--help")
    assert code == 0
    assert not re.search(r"default:\s+(None|\[\]|False)", text)


def test_every_option_has_a_help_text_and_places_their_forms(capsys: pytest.CaptureFixture[str]) -> None:
    for module in COMMANDS:
        parts = re.split(r"\n(?=  -)", outcome(capsys, module, "--help")[1])[1:]
        assert [part for part in parts if len(re.split(r"\s{2,}", part.strip())) < 2] == []
    assert "--from-hub USER/REPO[@REVISION]|file:DIR" in outcome(capsys, "join", "--help")[1]


@pytest.mark.parametrize("module", ["plan", "tokenize", "upcycle", "evaluate"])
def test_help_names_the_other_defaults(capsys: pytest.CaptureFixture[str], module: str) -> None:
    assert "(default: " in outcome(capsys, module, "--help")[1]


def test_the_reference_of_flags_is_what_the_declarations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == build_page(), f"run: {COMMAND}"


def test_the_references_of_settings_and_errors_are_what_the_code_says() -> None:
    for page, text in (
        (reference.CONFIGURATION, reference.build_configuration()),
        (reference.ERRORS, reference.build_errors()),
    ):
        assert page.read_text(encoding="utf-8") == text, f"run: {reference.COMMAND}"
        assert len(text.splitlines()) <= 150
    assert list(reference.ADVICE) == [kind.__name__ for kind in reference.all_errors()]


def test_every_setting_of_a_peer_is_a_flag_with_its_values_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(outcome(capsys, "join", "--help")[1].split())
    assert [flag.field for flag in flags_of(PeerConfig)] == list(PeerConfig().to_dict())
    assert (
        "--optimizer-states device|host where the optimiser's moments are; host: in host memory (default: device)"
        in text
    )
    assert "--host-maddrs MADDR [MADDR ...] addresses to listen on (default: /ip4/0.0.0.0/tcp/0)" in text
    assert "--profile N record N steps" in text
    assert "--data-differs train on data other than the run's --seed" in text


def test_flags_set_the_fields_after_which_they_are_named() -> None:
    words = "--client-mode --profile 3 --publish-mbps 1.5 --initial-peers a b --experts 2 --checkpoint-minutes 0"
    given = vars(parse_arguments(words.split()))
    assert given == {
        "client_mode": True,
        "profile_steps": 3,
        "publish_mbps": 1.5,
        "initial_peers": ["a", "b"],
        "experts": "2",
        "checkpoint_minutes": 0.0,
    }


def test_the_flags_in_the_pages_are_those_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    commands = [
        (str(page.relative_to(ROOT)), *found)
        for page in pages
        if page.name != "experiments.md"  # its commands are those of the commits that it names
        for found in re.findall(
            r"-m spes_swarm\.(\w+)((?: [^\n`#|]*)?)", page.read_text(encoding="utf-8").replace("\\\n", " ")
        )
    ]
    assert len({module for _, module, _ in commands}) > 8
    known: dict[str, set[str]] = {}
    for page, module, arguments in commands:
        if module not in known:
            name = "monitor.__main__" if module == "monitor" else module
            known[module] = set(re.findall(r"--[a-z-]+", outcome(capsys, name, "--help")[1]))
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known[module], (page, module, arguments)
