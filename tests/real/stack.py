"""A real LMCache server and a real vLLM on free loopback ports, started and stopped as processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .install_stack import model_of, python_of

CHUNK_SIZE = 32
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096
_START_SECONDS = 240.0
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get_json(url: str, *, body: dict[str, Any] | None = None) -> Any:
    """GET ``url``, or POST ``body`` to it, and return the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@dataclass
class Server:
    """One process of the stack, with what it printed kept in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args!r} ended at once:\n{self.tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except OSError:
                time.sleep(0.25)
        raise RuntimeError(f"{url} did not answer in {_START_SECONDS:.0f} s:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """End the process: politely first, then, after 20 s, by force."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End the process and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def _die_with_parent() -> None:
    # A test run that is killed must not leave servers behind.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _start(command: list[str | Path], log: Path) -> Server:
    environment = {**os.environ, **_ENVIRONMENT}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    return Server(process, log)


@dataclass
class CacheServer:
    """A running ``lmcache server``."""

    server: Server
    url: str
    http_url: str
    shm_name: str

    @property
    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = get_json(f"{self.http_url}/status")
        return answer

    @property
    def locked(self) -> tuple[int, int]:
        """Counts of objects that are read-locked and write-locked."""
        l1 = self.status["storage_manager"]["l1_manager"]
        return l1["read_locked_count"], l1["write_locked_count"]

    def clear(self, *, force: bool = False) -> None:
        get_json(f"{self.http_url}/cache/clear", body={"tier": "l1", "force": force})


@contextmanager
def lmcache_server(
    installed: Path,
    logs: Path,
    *,
    shared_memory: bool = True,
    chunk_size: int = CHUNK_SIZE,
    size_gb: float = 2,
    port: int | None = None,
    http_port: int | None = None,
    takes_clients: bool = True,
) -> Iterator[CacheServer]:
    port, http_port = port or free_port(), http_port or free_port()
    shm_name = f"lmcs{secrets.token_hex(4)}"
    command: list[str | Path] = [
        *(python_of(installed).parent / "lmcache", "server", "--host", "127.0.0.1"),
        *("--l1-size-gb", str(size_gb), "--eviction-policy", "LRU"),
        *("--chunk-size", str(chunk_size), "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
    ]
    if takes_clients:
        command += ["--supported-transfer-mode", "auto"]
    if shared_memory:
        command += ["--shm-name", shm_name, "--no-l1-use-lazy"]
    server = _start(command, logs / f"lmcache-{port}.log")
    url, http_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
    try:
        server.wait_until_ready(f"{http_url}/healthcheck")
        yield CacheServer(server, url, http_url, shm_name if shared_memory else "")
    finally:
        server.stop()


@dataclass
class Engine:
    """A running ``vllm serve``."""

    server: Server
    url: str
    model: str
    model_path: Path

    @property
    def running(self) -> int:
        """Requests that vLLM is working on, by its own count."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        counts = [line for line in lines if line.startswith("vllm:num_requests_running")]
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in counts))

    @property
    def is_alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def vllm_server(
    installed: Path,
    logs: Path,
    cache: CacheServer | None,
    *,
    dtype: str = "bfloat16",
    prefix_caching: bool = False,
) -> Iterator[Engine]:
    """Run vLLM; without a cache as `vllm serve MODEL` alone does."""
    port = free_port()
    model = model_of(installed)
    command: list[str | Path] = [
        *(python_of(installed).parent / "vllm", "serve", model, "--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE)),
        "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
    ]
    if cache is not None:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": int(cache.url.rsplit(":", 1)[1])},
        }
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    server = _start(command, logs / f"vllm-{port}.log")
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_until_ready(f"{url}/v1/models")
        yield Engine(server, url, "smollm2", model)
    finally:
        server.stop()
