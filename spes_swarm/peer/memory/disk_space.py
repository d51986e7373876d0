"""Whether the disk of OUTPUT_DIR has space for what a peer stores there, checked before anything is built."""

from __future__ import annotations

import shutil
from pathlib import Path

from spes_swarm.base.errors import CapacityError, os_errors_as
from spes_swarm.base.user_paths import existing_parent
from spes_swarm.base.wording import plural
from spes_swarm.config.peer import PeerConfig
from spes_swarm.peer.memory.capacity import Workload, gigabytes
from spes_swarm.storage.checkpoint import checkpoints_in
from spes_swarm.storage.checkpoint_files import reference_files
from spes_swarm.storage.checkpoint_writing import OVERHEAD_BYTES
from spes_swarm.storage.run_directory import RunDirectory


def check_disk(work: Workload, experts: int, peer: PeerConfig) -> str:
    """Refuses a disk without space for vectors that are not in memory, and for a first checkpoint.

    While a checkpoint is written, the earlier ones still exist; as far as they agree, they share files, so a disk
    without space for that many is only worth a warning.

    Returns:
        The warning, empty if there is none.

    Raises:
        CapacityError: it has less space.
    """
    checkpoints = RunDirectory(Path(peer.output_dir)).checkpoints
    num_vectors = (2 if work.on_disk else 0) + (2 if work.previous == "disk" else 0)
    vectors = 4 * num_vectors * work.layout.num_elements
    each = work.checkpoint_bytes(experts) + OVERHEAD_BYTES * (len(reference_files(work.layout)) + 3)
    existing = len(checkpoints_in(checkpoints))
    with os_errors_as(CapacityError, str(peer.output_dir)):
        free = shutil.disk_usage(existing_parent(checkpoints)).free
    needed = vectors + (0 if existing else each)
    if needed > free:
        part = "" if existing else f", {gigabytes(each)} of it for a checkpoint"
        advice = "free some space, or use"
        if work.previous == "disk":
            advice += " --previous-reference none (among three or more peers its work soon does not count), or"
        raise CapacityError(
            f"{peer.output_dir}: {gigabytes(needed)} are needed on its disk{part}, but only {gigabytes(free)} are "
            f"free; {advice} an --output-dir on a larger disk"
        )
    room = (free - vectors) // max(1, each)
    if room >= peer.keep_checkpoints + 1 - existing:
        return ""
    return (
        f"the disk of {peer.output_dir} has space for {plural(room, 'more checkpoint')} of up to {gigabytes(each)}; "
        f"{peer.keep_checkpoints} are kept while another one is written: free some space"
    )
