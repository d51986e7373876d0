"""Converts dense models to mixtures (upcycling), and evaluates exports (lm-evaluation-harness).

Imports `base`, `config`, `model` and `publishing`. Start with `upcycling`.
"""
