"""Who takes part: identities, signed records, and whose claims count.

Start with `reputation`: identities are free, so only peers whose work this peer has committed count.
"""
