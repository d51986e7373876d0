"""The folder of proofs in OUTPUT_DIR: what this peer has found out about others, for anybody to verify."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, Proof, open_proof

_SUFFIX = ".proof"


@dataclass(frozen=True)
class ProofFolder:
    """Saves proofs and reads those of earlier sessions."""

    path: Path

    def save(self, proof: Proof, data: bytes) -> Path:
        """Writes a proof to a file of its own, and returns where.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"round-{proof.round}-{proof.culprit[-8:]}-{proof.id.hex()[:8]}{_SUFFIX}"
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
        return file

    def read(self, run_id: str) -> list[tuple[Proof, Path]]:
        """The proofs that are valid and about this run; other files are ignored."""
        proofs = []
        for file in sorted(self.path.glob(f"*{_SUFFIX}")):
            with suppress(OSError, ProtocolError):
                if file.stat().st_size <= MAX_PROOF_BYTES and (proof := open_proof(file.read_bytes())).run_id == run_id:
                    proofs.append((proof, file))
        return proofs
