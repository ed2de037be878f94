"""Run every token-dropping example and notebook, on the embedded stack with its default model.

    python examples/run_all.py

Two at a time, each in a process of its own; what failed is shown at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_LONGEST = 600.0
FOLDER = Path(__file__).parent
SCRIPTS = ("random_drop.py", "streaming_llm.py", "snapkv.py", "rkv.py", "decode_time_dropping.py")


def run(path: Path, pictures: Path) -> str:
    """Run a script, which has to draw a picture, or a notebook; return what went wrong, or nothing."""
    started = time.monotonic()
    picture = pictures / f"{path.stem}.png"
    if path.suffix == ".ipynb":
        arguments = [str(FOLDER / "run_notebook.py"), str(path)]
    else:
        arguments = [str(path), "--picture", str(picture)]
    # Two processes with threads for every core each would wait for each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST,
    )
    print(f"{path.relative_to(FOLDER)}: {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode:
        return f"{path.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    if path.suffix == ".py" and not picture.is_file():
        return f"{path.name} drew no picture"
    return ""


def main() -> None:
    paths = [*(FOLDER / name for name in SCRIPTS), *sorted((FOLDER / "notebooks").glob("*.ipynb"))]
    with tempfile.TemporaryDirectory() as pictures, ThreadPoolExecutor(max_workers=2) as pool:
        problems = list(filter(None, pool.map(partial(run, pictures=Path(pictures)), paths)))
    if problems:
        raise SystemExit("\n\n".join(problems))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
