"""Data sets that are tokenised while they stream, and which peer trains on which part of them.

Start with `pieces`, the rules that all peers follow; `stream_sampler` makes batches of the pieces of one peer.
"""
