"""How the result of a part follows from its contributions, and what proves that it does not.

Pure functions, and signatures.
"""
