"""Connections to other peers, and what is asked over them.

Begin with `daemon` (p2pd), then `wire` (streams of tensors) and `rpc` (small questions).
"""
