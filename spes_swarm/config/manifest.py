"""The manifest of a run: its configuration and its founder, certified by the run id itself.

The run id ends in a digest of the manifest, so a peer that has the id can verify a manifest from any source. A peer
that has only an address learns the id from the manifest, and can compare it with the id announced elsewhere.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from spes_swarm.base.decoding import load_json
from spes_swarm.base.errors import ConfigError, ManifestError, ProtocolError
from spes_swarm.base.strict import check_section
from spes_swarm.config.run import RunConfig
from spes_swarm.protocol.members.identity import Identity, verify
from spes_swarm.protocol.version import PROTOCOL, check_version

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024
_OLDEST_FOUNDER = 2  # major version: runs go on once all their peers are upgraded
_MAX_ELEMENTS = 1 << 14  # an honest one has some 150 values
_DIGEST_CHARS = 24
_DOMAIN = b"spes_swarm/1\0manifest\0"


@dataclass(frozen=True)
class Manifest:
    """A verified manifest."""

    run_id: str
    run: RunConfig
    layout_digest: str  # hex digest of the parameter layout; reveals another version of a model at once
    founder: str  # peer id
    founder_key: bytes  # public, in DER
    data: bytes  # the signed bytes
    signature: bytes

    def to_wire(self) -> dict[str, bytes]:
        """Returns the form that peers exchange, and that is stored next to checkpoints."""
        return {"manifest": self.data, "signature": self.signature}


@dataclass(frozen=True)
class RawManifest:
    """A manifest in which everything but the model has been verified, without transformers."""

    run_id: str
    run: Mapping[str, Any]  # keys and values are those of a RunConfig
    layout_digest: str
    founder: str
    founder_key: bytes
    data: bytes
    signature: bytes
    source: str  # where it came from, for messages

    def build(self) -> Manifest:
        """Builds the run's configuration; imports transformers, which takes seconds.

        Raises:
            ManifestError: its model cannot be built here.
        """
        try:
            run = RunConfig.from_dict(self.run, source=f"manifest from {self.source}")
        except ConfigError as exc:
            raise _unusable(self.source, exc) from exc
        # transformers accepts many wrong settings, which then fail in other ways.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise _malformed(self.source) from exc
        return Manifest(self.run_id, run, self.layout_digest, self.founder, self.founder_key, self.data, self.signature)


def found_run(run: RunConfig, layout_digest: str, founder: Identity) -> Manifest:
    """Creates and signs the manifest of a new run."""
    content = {
        "format": FORMAT,
        "protocol": PROTOCOL,
        "run": run.to_dict(),
        "layout": layout_digest,
        "founder": base64.b64encode(founder.public_key_der).decode(),
    }
    data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return open_manifest({"manifest": data, "signature": founder.sign(_DOMAIN + data)}, source="this peer")


def run_id_of(name: str, data: bytes) -> str:
    """Returns the self-certifying id of a run."""
    return f"{name}-{blake3(data).hexdigest()[:_DIGEST_CHARS]}"


def open_manifest(wire: dict[str, Any], source: str, expected_run_id: str | None = None) -> Manifest:
    """Verifies a manifest received from `source` and builds its configuration.

    Raises:
        ManifestError: it is malformed, not signed by its founder, of another format or major version of the protocol,
            or not of `expected_run_id`.
    """
    return read_manifest(wire, source, expected_run_id).build()


def read_manifest(wire: dict[str, Any], source: str, expected_run_id: str | None = None) -> RawManifest:
    """Verifies a manifest received from `source`, except for its model, without transformers.

    Raises:
        ManifestError: as `open_manifest`, except for errors in the model.
    """
    data, signature = wire.get("manifest"), wire.get("signature")
    if not isinstance(data, bytes) or not isinstance(signature, bytes) or len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"the manifest from {source} is incomplete or too large")
    try:
        content = load_json(data, max_elements=_MAX_ELEMENTS)
        if "protocol" in content:  # not in those of version 1, whose runs go on
            check_version(content["protocol"], "its founder", oldest=_OLDEST_FOUNDER)
        if content["format"] != FORMAT:
            raise ManifestError(
                f"the run's manifest has format {content['format']!r:.20}; "
                f"this version of spes_swarm supports format {FORMAT}"
            )
        public_key = base64.b64decode(content["founder"], validate=True)
        founder = _founder_of(public_key, data, signature, source)
        run, layout_digest = content["run"], str(content["layout"])
        check_section(RunConfig, run, f"manifest from {source}: ", "run")
        run_id = run_id_of(run["name"], data)
    except ConfigError as exc:
        raise _unusable(source, exc) from exc
    except ProtocolError as exc:
        raise _unusable(source, exc.detail) from exc
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _malformed(source) from exc
    if expected_run_id is not None and run_id != expected_run_id:
        raise ManifestError(
            f"the manifest from {source} describes run {run_id}, not {expected_run_id}: "
            "it fails verification, or the address belongs to another run"
        )
    return RawManifest(run_id, run, layout_digest, founder, public_key, data, signature, source)


def _unusable(source: str, reason: object) -> ManifestError:
    return ManifestError(f"the manifest from {source} cannot be used: {reason}")


def _malformed(source: str) -> ManifestError:
    return ManifestError(f"the manifest from {source} is malformed")


def _founder_of(public_key: bytes, data: bytes, signature: bytes, source: str) -> str:
    try:
        return verify(public_key, _DOMAIN + data, signature)
    except ProtocolError as exc:
        raise ManifestError(f"the manifest from {source} is not signed by its founder: do not join it") from exc
