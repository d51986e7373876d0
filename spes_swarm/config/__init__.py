"""What a run is (`run.RunConfig`), how one peer takes part (`peer.PeerConfig`), and the manifest that names a run.

Imports `base` and `protocol`. Begin with `run`.
"""
