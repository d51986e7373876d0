"""Watches a swarm from outside, from the signed records in its DHT.

Imports `base`, `protocol`, `config`, `storage` and `network.link`; only reads. Begin with `state` (what all views
show), then `ledger` (from records to a run); `__main__` is the command.
"""
