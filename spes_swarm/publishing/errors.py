"""What can go wrong with publications, all of it for a person to mend.

UserError
├── HubError             the Hub or the directory refuses, is full, or cannot be reached
│   └── SupersededError  what is published already is newer, or another state of the same round
└── PublicationError     what is published, or is to be, cannot be used: malformed, damaged, of another run or model
"""

from __future__ import annotations

from spes_swarm.base.errors import UserError


class HubError(UserError):
    """A target or source refuses, is full, or cannot be reached; what was published before is still there."""


class SupersededError(HubError):
    """The target has a newer round, or another state of this one; nothing was published."""


class PublicationError(UserError):
    """A publication is malformed, damaged, or not of the expected run or model."""
