"""The monitor's web page and HTTP interface."""

from spes_swarm.monitor.web.server import serve

__all__ = ["serve"]
