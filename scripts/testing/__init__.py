"""Peers as child processes, private networks, faults, and a made-up swarm, for experiments and tests.

No other package imports it. Start with `local_peer`.
"""
