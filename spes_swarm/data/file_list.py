"""Lists of token files: `file_list.txt` names one file a line, as written by `find DIRECTORY -type f`.

SPES's own data preparation ends with such a list. Its order is that of a directory on one machine, so the files are
taken in the order of their paths instead: peers with the same files then have the same corpus.
"""

from __future__ import annotations

from pathlib import Path

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.data.files.contents import marked_encoding

FILE_LIST = "file_list.txt"


def listed_token_files(path: Path) -> list[Path]:
    """Returns the `.npy` files that a list names, sorted; none if there is no list, or it names none (as text does).

    A file that is named twice, by another spelling or through a link, counts once.

    Relative paths start at the list's folder or, where nothing lies there, at the working directory. Lines about other
    files are skipped, because `find` also lists descriptions, and the list itself.

    Raises:
        DataError: the list cannot be read, or a token file that it names does not exist.
    """
    if path.name != FILE_LIST or not path.is_file():
        return []
    with os_errors_as(DataError, f"{path} cannot be read"):
        content = path.read_bytes()
    lines = content.decode(marked_encoding(content), "surrogateescape").splitlines()
    found: dict[tuple[int, int], Path] = {}  # by device and inode
    for number, line in enumerate(lines, start=1):
        entry = line.strip()
        if not entry.endswith(".npy"):
            continue
        places = [path.parent / entry, Path(entry)]  # an absolute path stays what it is when joined
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise DataError(
                f"{path}, line {number}: {entry} does not exist here: correct the path, which may be relative to the "
                "list's folder"
            )
        status = file.stat()
        identity = status.st_dev, status.st_ino
        found[identity] = min(file, found.get(identity, file))
    return sorted(found.values())
