"""One round: its peers form a group, exchange their data and commit.

Start with `sync_round` (the round from top to bottom), then `rendezvous` (one group per round) and `exchange` (push,
pull, repair).
"""
