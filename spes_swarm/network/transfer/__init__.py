"""The reference for newcomers and for peers that fell behind, and the moments of adopted experts.

Begin with `download` (from many donors), then `transfer` (its two sides).
"""
