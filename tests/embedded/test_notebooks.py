"""The notebooks, run with a tiny model in place of the default one; what they computed is looked at."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
CHUNK = 32
UNTYPED: Any = nbformat

# What is to be kept of a prompt, by the shares that the notebook drops; None: a budget of two chunks.
RATIOS = {
    "random_drop": (0.25, 0.5, 0.75),
    "streaming_llm": (0.3, 0.6),
    "snapkv": (0.5, 0.5, 0.5),
    "rkv": (0.7, 0.7),
    "decode_time_dropping": None,
    "batch": (0.5, 0.5, 0.5, 0.5),
    "sync_batch": (0.5, 0.5, 0.5, 0.5),
}

# Of those that show reports: their titles.
REPORTS = {
    "batch": ["Batch of 4 streams: run"],
    "sync_batch": [f"Batch of 4 streams: {mode}" for mode in ("prefill", "modify", "decode")],
}

CHECK = """
import json
print(json.dumps({
    "prompt": len(prompt.token_ids),
    "lengths": [strip.length for strip in strips],
    "kept": [strip.kept for strip in strips],
    "decoded": stream.decoded_tokens(),
}))
"""


def execute(name: str, model: Path) -> Any:
    """Return a notebook that ran with another model and a cell before the last that tells what came of it.

    In a process of its own, because nbclient leaves an event loop behind.
    """
    path = FOLDER / f"{name}.ipynb"
    command = [sys.executable, str(FOLDER.parent / "run_notebook.py"), str(path)]
    command += ["--model", str(model), "--check", CHECK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return UNTYPED.reads(done.stdout, as_version=4)


def test_every_notebook_is_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(RATIOS)


@pytest.mark.parametrize("name", RATIOS)
def test_no_output_is_stored(name: str) -> None:
    notebook = UNTYPED.read(FOLDER / f"{name}.ipynb", as_version=4)
    UNTYPED.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("name", RATIOS)
def test_it_keeps_what_it_says_and_draws_it(name: str, tiny_folder: Path, endless_folder: Path) -> None:
    ratios = RATIOS[name]
    notebook = execute(name, endless_folder if ratios is None else tiny_folder)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    told = [output for output in outputs if output.get("name") == "stderr"]
    assert told == []
    (picture,) = (output.data["image/png"] for output in outputs if "image/png" in output.get("data", ()))
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", ())]
    titles = [title for page in pages for title in re.findall(r"<p><b>(.*?)</b></p>", page)]
    assert titles == REPORTS.get(name, [])
    assert all(re.search(r"streams failed</td>.*>0</td>", page) for page in pages)
    found = json.loads(notebook.cells[-2].outputs[0].text)
    kept = [len(indices) for indices in found["kept"]]
    if ratios is None:
        assert found["decoded"] == 4 * CHUNK
        assert kept == [2 * CHUNK] * 3
        assert found["lengths"] == sorted(set(found["lengths"]))
        assert found["lengths"][-1] > found["prompt"]
    else:
        length = found["prompt"]
        assert found["lengths"] == [length] * len(ratios)
        assert kept == [round(length * (1 - ratio) / CHUNK) * CHUNK for ratio in ratios]
        assert found["decoded"] > 1
    for indices, length in zip(found["kept"], found["lengths"], strict=True):
        assert indices == sorted(set(indices))
        assert 0 <= indices[0] <= indices[-1] < length
