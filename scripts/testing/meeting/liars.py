"""Hostile members of a swarm: each follows one plan for a while, and then another one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from scripts.testing.meeting.parts import seal
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.meeting.outputs import Answer, Call, Poll

# What a liar answers at once; None: nothing. WAIT: an empty answer after a second, as a leader gives while others come.
Lie = Answer | ProtocolError | str | None
WAIT = "wait"


class Liar:
    """One hostile member, which knows the statements that were given to it."""

    def __init__(self, name: str, names: list[str], chance: random.Random) -> None:
        self.name, self._names, self._chance = name, names, chance
        self.statements: dict[tuple[str, int], bytes] = {}
        self._favourite = name  # it sends others there
        self._victims: set[str] = set()
        self._plan: Callable[[str, Poll | Call], Lie] = self._nothing
        self.busy = False  # it calls and polls others all the time
        self.spoils = False  # the exchanges of its groups fail
        self.turn()

    @property
    def plan(self) -> str:
        """The name of the plan that it follows."""
        return self._plan.__name__.strip("_")

    def turn(self) -> str:
        """Turns to another plan; returns its name."""
        self._plan = self._chance.choice(_PLANS).__get__(self)
        others = [name for name in self._names if name != self.name]
        self._favourite = self._chance.choice(self._names)
        self._victims = set(self._chance.sample(others, self._chance.randint(1, len(others))))
        self.busy, self.spoils = self._chance.random() < 0.5, self._chance.random() < 0.3
        return self.plan

    def play_dead(self) -> None:
        """Turns to doing nothing, for ever."""
        self._plan, self.busy, self.spoils = self._nothing, False, False

    def answer(self, caller: str, asked: Poll | Call) -> Lie:
        """What it answers."""
        if isinstance(asked, Poll):
            self.statements[caller, asked.round] = asked.sealed
        return self._plan(caller, asked)

    def _group(self, number: int, names: set[str]) -> Answer:
        """A group of those whose statements it has."""
        own = {(self.name, number): seal(self.name, number)}
        known = {name: s for (name, of), s in {**self.statements, **own}.items() if of == number and name in names}
        return {"group": [known[name] for name in sorted(known)]}

    # Plans.

    def _nothing(self, caller: str, asked: Poll | Call) -> Lie:
        del caller, asked
        return None

    def _stalls(self, caller: str, asked: Poll | Call) -> Lie:
        return WAIT if isinstance(asked, Poll) else {"leader": self.name}

    def _stalls_some(self, caller: str, asked: Poll | Call) -> Lie:
        return self._stalls(caller, asked) if caller in self._victims else self._gives_all(caller, asked)

    def _is_over(self, caller: str, asked: Poll | Call) -> Lie:
        return {"over": True} if isinstance(asked, Poll) else {"target": asked.round + 1}

    def _is_early(self, caller: str, asked: Poll | Call) -> Lie:
        return {"early": True} if isinstance(asked, Poll) else {}

    def _sends_away(self, caller: str, asked: Poll | Call) -> Lie:
        return {"leader": self._favourite}

    def _sends_nowhere(self, caller: str, asked: Poll | Call) -> Lie:
        return {"leader": self._chance.choice(["nobody", "idle", "behind", ""])}

    def _leads_itself(self, caller: str, asked: Poll | Call) -> Lie:
        """Whoever polls it is held; whoever calls it is told that it leads."""
        return {"leader": self.name} if isinstance(asked, Call) else {}

    def _sends_to_and_fro(self, caller: str, asked: Poll | Call) -> Lie:
        return {"leader": self._chance.choice(self._names)}

    def _gives_all(self, caller: str, asked: Poll | Call) -> Lie:
        """The group of all, once most are here; so an honest leader would."""
        group = self._group(asked.round, set(self._names))
        return group if 2 * len(group["group"]) > len(self._names) else WAIT

    def _gives_two(self, caller: str, asked: Poll | Call) -> Lie:
        return self._group(asked.round, {self.name, caller})

    def _gives_different(self, caller: str, asked: Poll | Call) -> Lie:
        """Leaves out another one in the group of each."""
        group = self._group(asked.round, set(self._names) - {self._chance.choice(self._names)} | {caller})
        return group if 2 * len(group["group"]) > len(self._names) else WAIT

    def _gives_old(self, caller: str, asked: Poll | Call) -> Lie:
        return self._group(asked.round - 1, set(self._names))

    def _is_malformed(self, caller: str, asked: Poll | Call) -> Lie:
        malformed: list[Any] = [{"group": "x"}, {"group": [b"x"]}, {"group": [1]}, {"leader": 5}, {"target": "no"}]
        answer: Answer = self._chance.choice(malformed)
        return answer

    def _breaks_the_protocol(self, caller: str, asked: Poll | Call) -> Lie:
        return ProtocolError("malformed", "no answer at all")

    def _defers(self, caller: str, asked: Poll | Call) -> Lie:
        return {"leader": self._favourite, "defers": True}

    def _does_anything(self, caller: str, asked: Poll | Call) -> Lie:
        return self._chance.choice(_PLANS[:-1]).__get__(self)(caller, asked)  # type: ignore[no-any-return]


_PLANS: list[Any] = [
    Liar._nothing,
    Liar._stalls,
    Liar._stalls_some,
    Liar._is_over,
    Liar._is_early,
    Liar._sends_away,
    Liar._sends_nowhere,
    Liar._leads_itself,
    Liar._sends_to_and_fro,
    Liar._gives_all,
    Liar._gives_two,
    Liar._gives_different,
    Liar._gives_old,
    Liar._is_malformed,
    Liar._breaks_the_protocol,
    Liar._defers,
    Liar._does_anything,
]
