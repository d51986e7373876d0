"""A `transformers` Mixture-of-Experts, addressed in blocks, some of which a peer trains.

Imports `base`, `protocol` and `config`. Start with `sparse_model`; `losses` has the terms of the loss, `merge` the
expert merge (SPES Eqs. 5-6).
"""
