"""Data sets that are tokenised as they stream, and their division among the peers.

Start with `pieces`, the rules that all peers follow; `stream_sampler` makes batches from one peer's pieces.
"""
