"""Run a notebook and write it, with its outputs, to stdout.

python examples/run_notebook.py examples/notebooks/snapkv.ipynb > snapkv.ipynb
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

__all__ = ["run_notebook"]

_UNTYPED: Any = nbformat


def run_notebook(path: Path, *, model: str | None = None, check: str | None = None) -> str:
    """Return the notebook as JSON after it has run in its folder, in a kernel of its own.

    Args:
        path: the notebook.
        model: taken in place of the one in the cell that is tagged ``parameters``.
        check: code to run before the last cell, which closes what the others opened.
    """
    notebook = _UNTYPED.read(path, as_version=4)
    if model is not None:
        (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        parameters.source = f"model = {model!r}"
    if check is not None:
        notebook.cells.insert(-1, _UNTYPED.v4.new_code_cell(check))
    resources = {"metadata": {"path": str(path.parent)}}
    with tempfile.TemporaryDirectory() as folder:
        # Not over TCP, where anybody on the machine may listen, of which the kernel warns.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        NotebookClient(notebook, timeout=300, resources=resources, config=config).execute()
    return str(_UNTYPED.writes(notebook))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--model", help="in place of the notebook's")
    parser.add_argument("--check", metavar="CODE", help="code to run before the last cell")
    args = parser.parse_args()
    try:
        sys.stdout.write(run_notebook(args.notebook, model=args.model, check=args.check))
    except (CellExecutionError, OSError) as error:
        raise SystemExit(f"{args.notebook}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
