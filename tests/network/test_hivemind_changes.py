"""hivemind's version; what is changed in it is tested where it shows: decoding, records, clocks, calls."""

from __future__ import annotations

import subprocess
import sys

import hivemind
import pytest

from spes_swarm.network.transport.hivemind_changes import TESTED
from tests.helpers.repository import ROOT

_IMPORT = """
import warnings
warnings.simplefilter("ignore")
import hivemind
hivemind.__version__ = {version!r}
from spes_swarm.network.transport.hivemind_changes import check_version
check_version()
"""


def test_the_installed_version_is_a_tested_one_that_users_may_install() -> None:
    assert hivemind.__version__ in TESTED
    assert f'"hivemind>={TESTED[0]},' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("version", [TESTED[0], "1.1.99"])
def test_a_version_that_was_not_tested_is_a_warning_of_one_line(version: str) -> None:
    command = [sys.executable, "-c", _IMPORT.format(version=version)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    expected = (
        f"hivemind {version} is not tested with spes_swarm, which changes private parts of it: "
        f"pip install hivemind=={TESTED[-1]}\n"
    )
    assert done.stderr == ("" if version in TESTED else expected)
