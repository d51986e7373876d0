"""Dense models to mixtures (upcycling), and an export to a score (lm-evaluation-harness).

Imports `base`, `config` and `model`. Begin with `upcycling`.
"""
