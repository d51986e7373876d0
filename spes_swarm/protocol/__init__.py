"""The rules that all peers follow: pure functions and bookkeeping, without sockets, clocks of their own or tensors.

Imports `base` alone, and neither hivemind nor torch nor transformers, so that all of it is tested exhaustively.

- `consensus`  the reference that peers agree on, its layout, its digests, and the commits that led to it
- `members`    who a peer is, what it says of itself, and whose word counts
- `rounds`     one round: what members state, who reduces which part, what is accepted, what is committed
- `ownership`  which peer trains which expert

Begin with `rounds.plan`: who sends what to whom, as a function of signed statements.
"""
