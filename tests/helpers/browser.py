"""Headless Chromium that looks at the monitor's page."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from typing import Any

from playwright.sync_api import Browser, Page, Request, ViewportSize, expect

from scripts.testing.synthetic_swarm import SyntheticSwarm
from tests.helpers.served_monitor import PATIENCE_S, Served

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
# Chromium looks up and updates things of its own unless told not to.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
DESKTOP: ViewportSize = {"width": 1440, "height": 900}


class Visit:
    """A page, with all that it asked for and all that went wrong in it."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.context = browser.new_context(viewport=options.pop("viewport", DESKTOP), **options)
        self.context.set_default_timeout(PATIENCE_S * 1000)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.troubles: list[str] = []
        self.page.on("request", self._requested)
        self.page.on("console", lambda message: self._trouble(message.type, message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self._servers = ExitStack()

    def serve(self, swarm: SyntheticSwarm) -> Served:
        """Shows a swarm until the page is closed: a page that outlives its server reports that as trouble."""
        return self._servers.enter_context(Served(swarm))

    def close(self) -> None:
        """Closes the page, and then its servers."""
        with self._servers:
            self.context.close()

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)

    def _trouble(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(text)

    def load(self, served: Served) -> Page:
        """Shows the page once it has its history, which comes with a request of its own."""
        with self.page.expect_response("**/api/history") as history:
            self.page.goto(served.url)
        history.value.finished()
        return self.page

    def open(self, served: Served) -> Page:
        """Shows the page once it follows a swarm, too."""
        page = self.load(served)
        expect(page.locator("#link")).to_have_attribute("data-link", "live")
        page.evaluate("window.sameDocument = true")
        return page
