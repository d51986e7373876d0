"""Converts dense models to mixtures (upcycling), and evaluates exports (lm-evaluation-harness).

Imports `base`, `config` and `model`. Start with `upcycling`.
"""
