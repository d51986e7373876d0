"""Who may publish to a repository of a Hub: tokens, and the check at the start of a session."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported lazily

from spes_swarm.base.errors import HubError, PublicationError
from spes_swarm.publishing import repository
from spes_swarm.publishing.publication import read_export
from spes_swarm.publishing.publisher import check_target
from spes_swarm.publishing.repository import RepositoryTarget
from spes_swarm.publishing.source import open_source
from tests.helpers.hub_publications import publish, seen
from tests.helpers.hub_server import READ_TOKEN, STRANGER_TOKEN, USER, HubServer

# huggingface_hub still sends files as its HTTP library no longer likes them.
pytestmark = [
    pytest.mark.usefixtures("hub_environment"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("hf_wrong", "does not accept the token"),
        (READ_TOKEN, "needs write access"),
        (STRANGER_TOKEN, "needs write access"),
    ],
)
def test_a_token_that_does_not_do(
    hub: HubServer, name: str, exports: list[Path], monkeypatch: pytest.MonkeyPatch, token: str, why: str
) -> None:
    publish(name, exports[1])
    monkeypatch.setenv("HF_TOKEN", token)
    for attempt in (
        lambda: RepositoryTarget(name).check_rights(),
        lambda: RepositoryTarget(name).publish(exports[2], read_export(exports[2])),
    ):
        with pytest.raises(HubError, match=why) as refusal:
            attempt()
        assert token not in str(refusal.value)
    assert seen(hub, name).round == 1


def test_no_token_at_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    with pytest.raises(HubError, match="set HF_TOKEN, or run `hf auth login`"):
        RepositoryTarget(name).check_rights()


def test_a_repository_of_somebody_else() -> None:
    with pytest.raises(HubError, match="cannot create it"):
        RepositoryTarget("somebody/model").check_rights()
    RepositoryTarget("team/model").check_rights()  # an organisation of the token's owner


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="connection to the Hub failed"):
        RepositoryTarget(name).check_rights()
    with pytest.raises(HubError, match="connection to the Hub failed"):
        open_source(name)


def test_a_token_that_can_only_read_creates_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = RepositoryTarget(name)
    answer = {"name": USER, "orgs": [], "auth": {"accessToken": {"role": "read"}}}
    monkeypatch.setattr(target, "_api", SimpleNamespace(whoami=lambda **_: answer, repo_info=target._api.repo_info))
    with pytest.raises(HubError, match="can only read; use one with write access"):
        target.check_rights()


# The check at the start of a session.


def test_a_peer_that_may_publish(hub: HubServer, name: str, exports: list[Path]) -> None:
    assert check_target(name, "any-run") is None
    publish(name, exports[1])
    assert check_target(name, seen(hub, name).run_id) is None
    assert hub.refs(name).keys() == {"main", "round-000001"}


def test_a_repository_of_another_run_is_refused_at_the_start(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[1])
    with pytest.raises(PublicationError, match=f"belongs to run {seen(hub, name).run_id}, not another-run; choose"):
        check_target(name, "another-run")


@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_is_believed_at_the_start(hub: HubServer, name: str, status: int) -> None:
    hub.fail_next("status", match="whoami", status=status)
    with pytest.raises(HubError, match="token"):
        check_target(name, "any-run")


@pytest.mark.parametrize(
    "fault", [{"kind": "status", "status": 503}, {"kind": "status", "status": 429}, {"kind": "lose"}]
)
@pytest.mark.parametrize("match", ["whoami", "/api/models/"])
def test_a_hub_that_fails_is_asked_once_and_refuses_nothing(
    hub: HubServer, name: str, fault: dict[str, Any], match: str
) -> None:
    before = hub.counters()["requests"]
    hub.fail_next(match=match, times=-1, **fault)
    reason = check_target(name, "any-run")
    assert reason is not None
    assert reason.startswith(f"{name}: ")
    assert "again" not in reason
    hub.mend()
    assert hub.counters()["requests"] - before <= 4


def test_a_hub_out_of_reach_refuses_nothing_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert check_target(name, "any-run") == f"{name}: the connection to the Hub failed (ConnectError)"


def test_a_hub_that_does_not_answer_is_not_waited_for(
    hub: HubServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "QUICK", httpx.Timeout(1.0))
    hub.fail_next("hold", match="/api/whoami-v2", fraction=0.0)
    assert check_target(name, "any-run") == f"{name}: the Hub does not answer in time"
    hub.wait_held()
    hub.release()
