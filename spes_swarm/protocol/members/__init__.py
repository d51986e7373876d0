"""Who takes part: identities, signed records, and whose word counts.

Begin with `standing`: identities are free, so what counts is work that this peer has committed.
"""
