"""Learning questions about swarms, answered with virtual peers in one process: arms as YAML, paired seeds, a table."""
