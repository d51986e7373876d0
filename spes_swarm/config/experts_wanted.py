"""Which experts a user asks for with `--experts`."""

from __future__ import annotations

from typing import Literal

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import one_to

ExpertsWanted = Literal["auto"] | int | tuple[int, ...]


def parse_experts(text: str, num_experts: int) -> ExpertsWanted:
    """Parses `--experts`: "auto", a number of experts (`"2"` -> 2), or a sorted tuple of expert numbers.

    A single expert is written with a comma: `"3,"` -> (3,).

    Raises:
        ConfigError: none of these, more experts than the model has, an unknown expert, or one named twice.
    """
    where, text = f"experts: found {text!r}", text.strip()
    if text == "auto":
        return "auto"
    words = [word.strip() for word in text.split(",")]
    is_list = len(words) > 1
    if is_list and not words[-1]:
        words.pop()
    # isdecimal alone accepts the digits of other scripts, which are not numbers everywhere.
    if not all(word.isascii() and word.isdecimal() and len(word) <= 9 for word in words):
        raise ConfigError(f"{where}, expected auto, a number of experts, or experts such as 0,3,5")
    numbers = [int(word) for word in words]
    if not is_list:
        if not 1 <= numbers[0] <= num_experts:
            raise ConfigError(
                f"{where}, expected {one_to(num_experts, 'expert')} (for expert {numbers[0]}: '{numbers[0]},')"
            )
        return numbers[0]
    for number in numbers:
        if number >= num_experts:
            known = f"experts from 0 to {num_experts - 1}" if num_experts > 1 else "expert 0 (the model has no other)"
            raise ConfigError(f"{where}, expected {known}")
        if numbers.count(number) > 1:
            raise ConfigError(f"{where}, expected each expert once ({number} is repeated)")
    return tuple(sorted(numbers))
