"""Which experts a user asks for with `--experts`."""

from __future__ import annotations

from typing import Literal

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import one_to

ExpertsWanted = Literal["auto"] | int | tuple[int, ...]


def parse_experts(text: str, num_experts: int) -> ExpertsWanted:
    """What `--experts` asks for: "auto", a number of experts (`"2"` -> 2), or a sorted tuple of which ones.

    A single expert is chosen with a comma: `"3,"` -> (3,).

    Raises:
        ConfigError: garbage, a number of experts that the model does not have, or an expert named twice.
    """
    where, text = f"experts: found {text!r}", text.strip()
    if text == "auto":
        return "auto"
    words = [word.strip() for word in text.split(",")]
    is_list = len(words) > 1
    if is_list and not words[-1]:
        words.pop()
    # isascii: other scripts' digits pass isdecimal, and what looks like a number should be one everywhere.
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
