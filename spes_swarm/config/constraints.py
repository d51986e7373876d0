"""The values that single settings may have."""

from __future__ import annotations

from typing import Annotated, Any

from spes_swarm.base.strict import Pattern, Range

# What Llama's chat templates take for today if they have no clock.
DATE = "2024-07-26"

Count = Annotated[int, Range(1, 2**40)]
CountOrZero = Annotated[int, Range(0, 2**40)]  # 0 switches something off
BatchSize = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, Range(0, open_low=True)]
NotNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 0.999999)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Text = Annotated[str, Pattern(r".+", "non-empty text")]
Hex64 = Annotated[str, Pattern(r"[0-9a-f]{64}", "64 hexadecimal digits")]
Setting = int | float | bool | str | list[Any] | dict[str, Any] | None
