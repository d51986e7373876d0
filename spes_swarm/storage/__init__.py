"""What a peer stores on disk: its output directory, checkpoints, metrics.

Imports `base`, `protocol` and `config`. Start with `run_directory`.
"""
