"""The configuration of a run (`run.RunConfig`) and of a peer (`peer.PeerConfig`), and the manifest of a run.

Imports `base`, `protocol` and `metrics`. Start with `run`.
"""
