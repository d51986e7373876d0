"""Views of a run: terminal, web page, Prometheus metrics, experiment trackers, a figure for a report.

All of them show the values of `monitor.state`. Start with `terminal`.
"""
