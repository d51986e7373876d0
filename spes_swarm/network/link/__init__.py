"""Connections to other peers, and the requests sent over them.

Start with `daemon` (p2pd), then `wire` (tensor streams) and `rpc` (small requests).
"""
