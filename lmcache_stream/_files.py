"""Files that are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["replace_file"]


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
