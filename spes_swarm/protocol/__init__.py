"""The rules that all peers follow: pure functions and bookkeeping, without networking or torch tensors.

Imports only `base`, and not hivemind, torch or transformers, so all of it can be tested exhaustively.

- `consensus`  the reference that peers agree on, its layout, its digests, and the commits that led to it
- `members`    peer identities, signed records, and whose claims count
- `admission`  who may take part in a private run
- `averaging`  what a reducer commits to, and what proves that it has lied
- `meeting`    how the group of a round forms
- `rounds`     one round: members' statements, who reduces which part, what is accepted, what is committed
- `ownership`  which peer trains which expert
- `bitmap`     sets of small numbers in messages
- `version`    the version that every message carries, and what a new one may change

Start with `rounds.plan`: who sends what to whom, as a function of signed statements.
"""
