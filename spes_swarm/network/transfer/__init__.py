"""Transfer of the reference to newcomers and to peers that fell behind.

Start with `download` (from many donors), then `transfer` (the donor's side).
"""
