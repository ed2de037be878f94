"""Finding and reading a model's config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.cache.model_config import ModelConfig, load_model_config
from lmcache_stream.errors import GeometryError
from tests.rope.configs import CONFIGS
from tests.rope.reference import as_transformers_5, config_object

SMOL = CONFIGS["SmolLM2-135M"]
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}


@pytest.fixture(autouse=True)
def no_hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("config", "sizes", "dtype", "is_mla", "vocab_size"),
    [
        (SMOL, (30, 3, 64), torch.bfloat16, False, 49152),
        (as_transformers_5(SMOL), (30, 3, 64), torch.bfloat16, False, 49152),
        ({**SMOL, "torch_dtype": torch.float16}, (30, 3, 64), torch.float16, False, 49152),
        ({**SMOL, "torch_dtype": "torch.float32"}, (30, 3, 64), torch.float32, False, 49152),
        ({**SMOL, "torch_dtype": "auto"}, (30, 3, 64), None, False, 49152),
        (CONFIGS["Mistral-Nemo"], (40, 8, 128), torch.bfloat16, False, 131072),
        (CONFIGS["pythia-1.4b"], (24, 16, 128), torch.float16, False, 50304),
        (DEEPSEEK, (61, 1, 576), torch.bfloat16, True, 129280),
        (GPT2, (12, 12, 64), None, False, 50257),
    ],
)
def test_sizes(
    config: dict[str, Any],
    sizes: tuple[int, int, int],
    dtype: torch.dtype | None,
    is_mla: bool,
    vocab_size: int,
) -> None:
    read = load_model_config(config, "any")
    assert read is not None
    assert (read.num_layers, read.num_kv_heads, read.head_size) == sizes
    assert (read.dtype, read.is_mla, read.vocab_size) == (dtype, is_mla, vocab_size)
    assert read.model_type == config["model_type"]
    assert read.raw == config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_object_reads_like_its_dict(name: str) -> None:
    config = CONFIGS[name]
    read = load_model_config(config_object(config), "any")
    plain = load_model_config(config, "any")
    assert read is not None
    assert plain is not None
    found = (read.num_layers, read.num_kv_heads, read.head_size, read.vocab_size)
    assert found == (plain.num_layers, plain.num_kv_heads, plain.head_size, plain.vocab_size)


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_text_part_is_read(part: str) -> None:
    text = {key: value for key, value in SMOL.items() if key != "torch_dtype"}
    whole = {"model_type": "llava", "torch_dtype": "float16", "hidden_size": 1, part: text}
    read = load_model_config(whole, "any")
    assert read is not None
    assert (read.num_kv_heads, read.head_size, read.model_type) == (3, 64, "llama")
    assert read.dtype == torch.float16
    assert read.raw == text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "num_attention_heads|hidden_size|must be a positive int"),
        ({**SMOL, "num_hidden_layers": None}, "num_hidden_layers must be a positive int, not None"),
        ({**SMOL, "num_key_value_heads": [3, 3]}, r"num_key_value_heads must be .* not \[3, 3\]"),
        ({**SMOL, "hidden_size": 577}, "does not divide"),
        ({**SMOL, "head_dim": 0}, "head_dim must be a positive int, not 0"),
        ({**DEEPSEEK, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**GPT2, "multi_query": True}, "multi_query has no common meaning: pass geometry="),
    ],
)
def test_missing_sizes_are_errors(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(GeometryError, match=reason):
        load_model_config(config, "any")


def write(folder: Path, config: object = SMOL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def download(cache: Path, name: str, *, revision: str = "0123abc") -> None:
    """Lay a repository out as huggingface_hub does, an older snapshot beside the current one."""
    repository = cache / ("models--" + name.replace("/", "--"))
    write(repository / "snapshots" / revision)
    write(repository / "snapshots" / "00old", {**SMOL, "num_hidden_layers": 99})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def layers(config: ModelConfig | None) -> int:
    assert config is not None
    return config.num_layers


def test_folders_and_files(tmp_path: Path) -> None:
    path = write(tmp_path / "models" / "smol")
    for given in (path, str(path), path.parent, str(path.parent), "models/smol", "models/smol/"):
        assert layers(load_model_config(given, "other")) == 30
    assert layers(load_model_config(None, str(path.parent))) == 30
    assert layers(load_model_config(None, "models/smol")) == 30
    os.environ["HOME"] = str(tmp_path)
    assert layers(load_model_config("~/models/smol", "other")) == 30


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "hf"}, "hf/hub"),
        ({"HF_HOME": "~/hf"}, "home/hf/hub"),
        ({"HF_HUB_CACHE": "there"}, "there"),
        ({"HUGGINGFACE_HUB_CACHE": "there"}, "there"),
        ({"HF_HUB_CACHE": "there", "HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}, "there"),
        ({"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}, "hf/hub"),
    ],
)
@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "gpt2"])
def test_the_local_hub_cache(
    environment: Mapping[str, str],
    cache: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert load_model_config(None, name) is None
    download(tmp_path / cache, name)
    assert layers(load_model_config(None, name)) == 30
    assert layers(load_model_config(name, "served-name")) == 30


def test_a_folder_goes_before_the_hub_cache(tmp_path: Path) -> None:
    download(tmp_path / "home/.cache/huggingface/hub", "org/model")
    write(tmp_path / "org" / "model", {**SMOL, "num_hidden_layers": 7})
    assert layers(load_model_config(None, "org/model")) == 7


@pytest.mark.parametrize("name", ["org/model", "/models/smol", "served-name", "a/b/c", "../x", ""])
def test_nothing_found_for_the_model_name(name: str) -> None:
    assert load_model_config(None, name) is None


def test_what_was_given_and_not_found_names_what_was_tried() -> None:
    with pytest.raises(GeometryError) as caught:
        load_model_config("org/model", "other")
    message = str(caught.value)
    assert "model_config='org/model': no config found; tried org/model/config.json" in message
    assert "home/.cache/huggingface/hub/models--org--model/snapshots/main/config.json" in message
    with pytest.raises(GeometryError, match=r"tried gone\.json"):
        load_model_config("gone.json", "other")


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "cannot be read"), ("[1]", "holds a list"), ("{}", "must be a positive int")],
)
def test_an_unreadable_config_is_an_error_wherever_it_was_found(
    content: str, reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "broken", content).parent
    for arguments in ((str(folder), "other"), (None, str(folder))):
        with pytest.raises(GeometryError, match=reason):
            load_model_config(*arguments)


@pytest.mark.parametrize("given", [42, b"folder", ["config.json"]])
def test_other_things_are_refused(given: object) -> None:
    with pytest.raises(GeometryError, match="must be a config object, a dict, a path or"):
        load_model_config(given, "any")
