"""Foundations of all other packages, independent of the swarm: errors, wording, addresses, strict settings.

Imports no other package of spes_swarm, and neither hivemind nor torch nor transformers. Start with `errors`.
"""
