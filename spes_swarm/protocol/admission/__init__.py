"""Who may take part in a private run.

Pure: no I/O, no clock of its own.
"""
