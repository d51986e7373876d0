"""What a peer stores on disk: its output directory, checkpoints, metrics.

Imports `base`, `protocol` and `config`. Begin with `run_directory`.
"""
