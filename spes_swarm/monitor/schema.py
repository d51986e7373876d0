"""The published JSON schema of a state and of a point of the history, derived from their declarations in state.py."""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from spes_swarm.monitor.state import SCHEMA_VERSION, HistoryPoint, SwarmState

_HEADER: Final = {
    "$schema": GenerateJsonSchema.schema_dialect,
    "$id": f"https://spes-swarm.invalid/schema/monitor-{SCHEMA_VERSION}.json",
    "title": "State of a spes_swarm run",
    "description": "What `python -m spes_swarm.monitor --once --json` prints and `/api/state` answers. Times are Unix "
    "seconds of the swarm's clock. Lists are sorted.",
}


class _Strict(GenerateJsonSchema):
    """Objects have exactly the declared fields; names of fields are not repeated as titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        found = super().dataclass_schema(schema)
        return {**found, "additionalProperties": False, "required": sorted(found["properties"])}

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def _state_schema() -> dict[str, Any]:
    adapters: list[tuple[type, Literal["serialization"], TypeAdapter[Any]]] = [
        (kind, "serialization", TypeAdapter(kind)) for kind in (SwarmState, HistoryPoint)
    ]
    _, found = TypeAdapter.json_schemas(adapters, schema_generator=_Strict)
    names = rf'"((?:#/\$defs/)?)({"|".join(found["$defs"])})"'
    text = re.sub(names, lambda name: f'"{name[1]}{_snake(name[2])}"', json.dumps(found))
    definitions = json.loads(text)["$defs"]
    state = definitions.pop("swarm")
    state["properties"]["schema"] = {"const": SCHEMA_VERSION, "description": "version of this format"}
    state["required"].append("schema")
    return {**state, **_HEADER, "$defs": definitions}


def _snake(name: str) -> str:
    """The name of a class in the schema: `peer` for PeerState, `history_point` for HistoryPoint."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("State")).lower()


# The schema of `SwarmState.to_json`; its `#/$defs/history_point` is the schema of `HistoryPoint.to_json`.
STATE_SCHEMA: Final = _state_schema()
