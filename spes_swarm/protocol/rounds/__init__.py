"""One round of sparse synchronisation, as every member computes it.

Start with `plan` (who reduces which part), then `round_state` (the all-reduce itself: accept, reduce, commit).
"""
