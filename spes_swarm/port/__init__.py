"""The interface between a peer's trainer and its network process: commands and messages.

Imports `base`, `protocol` and `config`; both sides import it, and neither imports the other. Start with `commands`.
"""
