"""Between a peer's trainer and its network process: the commands, and what they carry.

Imports `base`, `protocol` and `config`; both sides import it, and neither imports the other. Begin with `commands`.
"""
