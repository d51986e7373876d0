"""hivemind's version; what is changed in it is tested where it shows: decoding, records, clocks, calls."""

from __future__ import annotations

import hivemind
import pytest

from spes_swarm.network.transport.hivemind_changes import TESTED, check_version
from tests.helpers.repository import ROOT


def test_the_installed_version_is_a_tested_one_that_users_may_install() -> None:
    assert hivemind.__version__ in TESTED
    assert f'"hivemind>={TESTED[0]},' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", [TESTED[0], "1.1.99"])
def test_a_version_that_was_not_tested_is_a_warning_of_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(hivemind, "__version__", version)
    check_version()
    expected = (
        f"hivemind {version} is not tested with spes_swarm, which changes private parts of it: "
        f"pip install hivemind=={TESTED[-1]}"
    )
    assert caplog.messages == ([] if version in TESTED else [expected])
