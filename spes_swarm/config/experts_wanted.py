"""Which experts a user asks for with `--experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import one_to
from spes_swarm.config.model_size import MAX_EXPERTS

EXPERTS_FORMS = "auto, a number of experts, or experts such as 0,3,5"


@dataclass(frozen=True)
class ExpertsWanted:
    """As many experts as the run wants (`auto`), that many (`2`), or certain ones (`0,3`; a single one is `3,`)."""

    text: str  # as the user wrote it
    number: int | None  # None: auto
    named: tuple[int, ...] | None  # ascending; None: any

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `--experts`.

        Raises:
            ConfigError: none of these, no expert at all, more than any model has, or one named twice; the message lacks
                the name of the setting.
        """
        words = [word.strip() for word in text.split(",")]
        if words == ["auto"]:
            return cls(text, None, None)
        is_list = len(words) > 1
        if is_list and not words[-1]:
            words.pop()
        # isdecimal alone accepts the digits of other scripts, which are not numbers everywhere.
        if not all(word.isascii() and word.isdecimal() and len(word) <= 9 for word in words):
            raise ConfigError(f"found {text!r}, expected {EXPERTS_FORMS}")
        numbers = [int(word) for word in words]
        if not is_list:
            if numbers == [0]:
                raise ConfigError(f"found {text!r}, expected at least 1 expert (for expert 0: '0,')")
            return cls(text, numbers[0], None)._within(MAX_EXPERTS)
        for number in numbers:
            if numbers.count(number) > 1:
                raise ConfigError(f"found {text!r}, expected each expert once ({number} is repeated)")
        return cls(text, len(numbers), tuple(sorted(numbers)))._within(MAX_EXPERTS)

    def check(self, num_experts: int) -> None:
        """Refuses what a model with that many experts does not have.

        Raises:
            ConfigError: it has fewer experts, or lacks one that is named.
        """
        try:
            self._within(num_experts)
        except ConfigError as exc:
            raise ConfigError(f"experts: {exc}") from None

    def _within(self, num_experts: int) -> Self:
        if self.named is None and (self.number or 0) > num_experts:
            expected = one_to(num_experts, "expert")
        elif self.named is not None and self.named[-1] >= num_experts:
            expected = (
                f"experts from 0 to {num_experts - 1}" if num_experts > 1 else "expert 0 (the model has no other)"
            )
        else:
            return self
        raise ConfigError(f"found {self.text!r}, expected {expected}")
