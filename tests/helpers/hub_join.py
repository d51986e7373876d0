"""Peers that use a test's Hub, or none."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path

from huggingface_hub import constants

from scripts.testing.forked_peer import ForkServer
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.slow_join import PAUSE_S, sleeping_main


def launch_at(hub: HubServer, token: str | None = TOKEN, pause_s: float = PAUSE_S) -> ForkServer:
    """Starts `join` as a user of this Hub would, with a pause before each training step."""
    return ForkServer(main=partial(_main, Path.cwd(), pause_s), environment=hub.environment(token))


def launch_without_hub(directory: Path) -> ForkServer:
    """Starts `join` in this working directory. Nothing answers in the Hub's place."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    return ForkServer(main=partial(_main, directory, PAUSE_S), environment=environment)


def _main(directory: Path, pause_s: float, arguments: list[str]) -> int:
    os.chdir(directory)
    importlib.reload(constants)  # the fork server imported it in another environment
    return sleeping_main(pause_s, arguments)
