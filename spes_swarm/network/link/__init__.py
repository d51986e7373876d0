"""Connections to other peers, and the requests sent over them.

Start with `wire` (tensor streams) and `rpc` (small requests).
"""
