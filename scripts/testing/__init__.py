"""Peers as child processes, private networks, and faults, for experiments and tests.

No other package imports it. Start with `local_peer`.
"""
