"""Files that are written whole, or not at all; and folders that are not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["is_missing_folder", "replace_file"]


def is_missing_folder(name: str) -> bool:
    """Return whether a model's name can only be a folder's, and there is no such folder."""
    return name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside ``path`` and move it there; a device or a pipe is written to where it is.

    Raises:
        OSError: it cannot be written; then what was there is still there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    # Path.resolve() raises no OSError, but a RuntimeError, of links that lead to each other.
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
