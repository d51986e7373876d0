"""What a peer leaves on disk: its directory, checkpoints, metrics.

Imports `base`, `protocol` and `config`. Begin with `run_directory`.
"""
