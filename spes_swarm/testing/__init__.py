"""Peers as child processes, networks of their own, and faults, for experiments and tests.

Nothing of the product imports it. Begin with `local_peer`.
"""
