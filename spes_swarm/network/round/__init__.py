"""How the peers of a run meet for a round, and move its bytes.

Begin with `rendezvous` (one group for each round), then `exchange` (push, pull, repair).
"""
