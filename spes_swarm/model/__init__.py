"""A transformers mixture of experts, addressed in blocks, of which a peer trains some.

Imports `base`, `protocol` and `config`. Begin with `sparse_model`; `losses` has the terms of the loss, `merge` the
expert merge (SPES Eqs. 5-6).
"""
