"""Watches a swarm from outside through the signed records in its DHT; it never writes any.

Imports `base`, `protocol`, `config`, `storage` and `network.link`. Start with `state` (the values that all views show),
then `ledger` (turns records into the state of a run); `__main__` is the command.
"""
