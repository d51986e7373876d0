"""Which peer trains which expert: adoption when a holder dies, giving way, rotation, and what is handed over.

Begin with `assignment.reassign`: what every peer holds after a commit.
"""
