"""One round: its peers form a group and exchange their data.

Start with `rendezvous` (one group per round), then `exchange` (push, pull, repair).
"""
