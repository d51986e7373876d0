"""The monitor's web page and HTTP interface."""

from spes_swarm.monitor.views.web.server import listen, serve

__all__ = ["listen", "serve"]
