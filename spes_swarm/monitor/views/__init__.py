"""What shows a run: terminal, page, metrics for Prometheus, trackers, a figure for a report.

Each takes the one state of `monitor.state`. Begin with `terminal`.
"""
