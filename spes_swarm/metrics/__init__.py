"""The events that a peer writes to its metrics.jsonl.

Imports `base` and `protocol`. Start with `events`.
"""
