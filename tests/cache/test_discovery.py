"""What /status, a configuration and the caller say of the KV, and each contradiction between them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lmcache_stream.cache.discovery import discover, with_dtype
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.model_config import ModelConfig
from lmcache_stream.errors import GeometryError

MODEL = "/models/llama"
CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
)
MLA_CONFIG = ModelConfig.from_dict(
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
)


def config(**changes: Any) -> ModelConfig:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    return ModelConfig(**{**fields, **changes})


def geometry(**changes: Any) -> KVGeometry:
    fields: dict[str, Any] = {
        "num_layers": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
        "layout": "two-plane",
        "block_size": 16,
    }
    return KVGeometry(**{**fields, **changes})


# The sizes of LMCache's words for axes, of the model above in 2048 blocks of 16 tokens.
SIZES = {"NB": "2048", "NL": "32", "BS": "16", "NH": "8", "HS": "128", "NBBS": "32768"}
LABELS = {"ONE": "1", "TWO": "2", "NBBS": "PBS"}


def rendered(name: str, sizes: dict[str, str]) -> str:
    """Render a format's name as LMCache does: ``NL_X_TWO_NB`` -> ``NL x [2, NB]``."""
    *outer, inner = name.split("_X_")

    def label(word: str) -> str:
        return sizes.get(word, LABELS.get(word, word))

    return " x ".join([*map(label, outer), f"[{', '.join(map(label, inner.split('_')))}]"])


def group(name: str = "NL_X_TWO_NB_BS_NH_HS", **changes: Any) -> dict[str, Any]:
    known = set(re.split("_X_|_", name)) <= {*SIZES, *LABELS}
    return {
        "num_layers": 32,
        "tokens_per_block": 16,
        "dtype": "torch.bfloat16",
        "engine_kv_format": name,
        "engine_kv_shape": rendered(name, {}),
        "engine_kv_concrete_shape": rendered(name, SIZES) if known else f"Unknown ({name})",
        **changes,
    }


def device(*groups: dict[str, Any], name: str = MODEL, world_size: Any = 1, **layout: Any) -> dict[str, Any]:
    """The status of a server with a GPU engine."""
    found = {"num_layers": 32, "num_blocks": 2048, "kernel_groups": list(groups or [group()]), **layout}
    entry = {"model_name": name, "world_size": world_size, "kv_cache_layout": found}
    return {"cache_context_meta": {"1": entry}, "non_cuda_context_meta": {}}


def driven(**changes: Any) -> dict[str, Any]:
    """The status of a server with an engine-driven engine, vLLM on a CPU."""
    entry = {"model_name": MODEL, "world_size": 1, "block_size": 32, "use_mla": True, **changes}
    return {"cache_context_meta": {}, "non_cuda_context_meta": {"1": entry}}


def set_amx(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)


def test_the_shapes_here_are_rendered_as_lmcache_does() -> None:
    assert group()["engine_kv_shape"] == "NL x [2, NB, BS, NH, HS]"
    assert group()["engine_kv_concrete_shape"] == "32 x [2, 2048, 16, 8, 128]"
    assert group("TWO_X_NL_X_NBBS_NH_HS")["engine_kv_shape"] == "2 x NL x [PBS, NH, HS]"
    assert group("TWO_X_NL_X_NBBS_NH_HS")["engine_kv_concrete_shape"] == "2 x 32 x [32768, 8, 128]"
    assert group("NL_X_NB_NH_BS_CS")["engine_kv_concrete_shape"] == "Unknown (NL_X_NB_NH_BS_CS)"


@pytest.mark.parametrize("given_config", [None, CONFIG], ids=["no config", "config"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", "two-plane"),
        ("NL_X_NB_TWO_NH_BS_HS", "two-plane"),
        ("NB_NL_TWO_BS_NH_HS", "two-plane"),
        ("TWO_X_NL_X_NBBS_NH_HS", "two-plane"),
        ("TWO_X_NL_X_NB_BS_NH_HS", "two-plane"),
        ("NL_X_NB_BS_NH_TWO_HS", "fused"),
        ("NL_X_NB_NH_BS_TWO_HS", "fused"),
    ],
)
def test_a_gpu_engine_tells_everything(name: str, layout: str, given_config: ModelConfig | None) -> None:
    found = discover(device(group(name)), MODEL, given_config, None)
    assert found.geometry == geometry(layout=layout)
    assert not found.assumed
    assert not found.alone


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_of_a_gpu_engine_is_its_caches_and_not_its_weights(dtype: str) -> None:
    found = discover(device(group(dtype=f"torch.{dtype}")), MODEL, CONFIG, None)
    assert found.geometry.dtype is getattr(torch, dtype)


def test_a_format_whose_sizes_are_not_told_takes_the_configurations() -> None:
    status = device(group("NL_X_NB_NH_BS_CS"))
    assert discover(status, MODEL, CONFIG, None).geometry == geometry(layout="fused")
    with pytest.raises(GeometryError, match="KV heads of '/models/llama' are not known: pass model_config="):
        discover(status, MODEL, None, None)


def test_a_gpu_engine_with_mla() -> None:
    shape = {"engine_kv_shape": "NL x [NB, BS, HS]", "engine_kv_concrete_shape": "61 x [2048, 16, 576]"}
    status = device(group("NL_X_NB_BS_HS", num_layers=61, **shape), num_layers=61)
    found = discover(status, MODEL, MLA_CONFIG, None)
    assert found.geometry == geometry(layout="mla", num_layers=61, num_kv_heads=1, head_size=576)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (device(group(), group()), "2 groups of KV layers .*hybrid or sliding-window"),
        (device(group(), group("NL_X_NB_BS_HS"), group()), "3 groups"),
        (device(world_size=2), "2 tensor-parallel workers; only 1"),
        (device(world_size="1"), "tensor-parallel workers"),
        (device(group("NL_X_NB_BSV_BSS")), "'NL_X_NB_BSV_BSS' is not supported"),
        (device(group("SOMETHING_NEW")), "'SOMETHING_NEW' is not supported"),
        (device(group(engine_kv_format=None)), "not supported"),
        (device(group(engine_kv_format="")), "not supported"),
        (device(group(dtype="torch.float8_e4m3fn")), "quantised KV"),
        (device(group(dtype="torch.uint8")), "dtype"),
        (device(group(dtype="torch.float33")), "unknown KV dtype 'torch.float33'"),
        (device(group(dtype=None)), "unknown KV dtype None"),
        (device(group(dtype="nn")), "unknown KV dtype 'nn'"),
        (device(group(tokens_per_block=0)), "tokens_per_block=0"),
        (device(group(tokens_per_block=None)), "tokens_per_block=None"),
        (device(group(tokens_per_block=True)), "tokens_per_block=True"),
        (device(group(), num_layers=None), "num_layers=None|None layers"),
        (device(group(), num_layers="32"), "num_layers='32'|32 layers"),
        (device(kernel_groups=[]), "no kv_cache_layout"),
        (device(kernel_groups=None), "no kv_cache_layout"),
        (device(kernel_groups={"0": group()}), "no kv_cache_layout"),
        (device(kernel_groups=["group"]), "no kv_cache_layout"),
        ({"cache_context_meta": {"1": {"model_name": MODEL}}}, "no kv_cache_layout"),
        ({"cache_context_meta": {"1": {"model_name": MODEL, "kv_cache_layout": [1]}}}, "no kv_cache_layout"),
    ],
)
@pytest.mark.parametrize("given_config", [None, CONFIG], ids=["no config", "config"])
def test_what_a_gpu_engine_registers_that_cannot_be_edited_is_refused_with_the_reason(
    status: dict[str, Any], reason: str, given_config: ModelConfig | None
) -> None:
    with pytest.raises(GeometryError, match=reason):
        discover(status, MODEL, given_config, None)


@pytest.mark.parametrize(
    "other",
    [config(num_layers=31), config(num_kv_heads=4), config(head_size=64), MLA_CONFIG],
    ids=["layers", "heads", "head size", "MLA"],
)
def test_a_configuration_of_another_model_is_a_contradiction(other: ModelConfig) -> None:
    with pytest.raises(GeometryError, match="32 layers with 8 KV heads of 128, model_config= has"):
        discover(device(), MODEL, other, None)


def test_a_dtype_of_the_configuration_is_no_contradiction() -> None:
    found = discover(device(), MODEL, config(dtype=torch.float16), None)
    assert found.geometry.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 31},
        {"num_kv_heads": 4},
        {"head_size": 64},
        {"dtype": torch.float16},
        {"layout": "fused"},
        {"block_size": 32},
    ],
    ids=str,
)
def test_a_geometry_that_is_not_the_gpu_engines_is_a_contradiction(other: dict[str, Any]) -> None:
    assert discover(device(), MODEL, None, geometry()).geometry == geometry()
    with pytest.raises(GeometryError, match=r"geometry= says .*, but the engine registered"):
        discover(device(), MODEL, None, geometry(**other))


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize(
    ("dtype", "block_size", "head_size", "with_amx"),
    [
        (torch.bfloat16, 32, 64, "cpu-amx"),
        (torch.bfloat16, 128, 128, "cpu-amx"),
        (torch.bfloat16, 16, 128, "cpu-vec"),
        (torch.bfloat16, 48, 128, "cpu-vec"),
        (torch.bfloat16, 32, 80, "cpu-vec"),
        (torch.float16, 32, 128, "cpu-vec"),
        (torch.float32, 128, 128, "cpu-vec"),
    ],
)
def test_a_cpu_engine_takes_the_layout_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    block_size: int,
    head_size: int,
    with_amx: str,
    amx: bool,
) -> None:
    set_amx(monkeypatch, amx)
    given = config(dtype=dtype, head_size=head_size)
    found = discover(driven(block_size=block_size), MODEL, given, None)
    wanted = with_amx if amx else "cpu-vec"
    assert found.geometry == geometry(dtype=dtype, block_size=block_size, head_size=head_size, layout=wanted)
    # Neither dtype nor layout was registered, so the first chunk has to confirm them.
    assert found.assumed
    assert not found.alone


def test_on_another_machine_than_x86_the_layout_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(GeometryError, match=r"on aarch64 is not known: pass layout='auto' .*cpu-vec"):
        discover(driven(), MODEL, CONFIG, None)
    given = geometry(layout="cpu-vec", block_size=32)
    assert discover(driven(), MODEL, None, given).geometry is given
    assert discover(driven(use_mla=False), MODEL, CONFIG, None).geometry == geometry(block_size=32)


def test_an_engine_that_registers_two_planes_has_two_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_amx(monkeypatch, True)
    found = discover(driven(use_mla=False), MODEL, CONFIG, None)
    assert found.geometry == geometry(block_size=32)
    assert found.assumed


def test_one_plane_of_an_mla_model_is_a_latent() -> None:
    found = discover(driven(), MODEL, MLA_CONFIG, None)
    wanted = geometry(layout="mla", num_layers=61, num_kv_heads=1, head_size=576, block_size=32)
    assert found.geometry == wanted


def test_two_planes_of_an_mla_model_are_a_contradiction() -> None:
    with pytest.raises(GeometryError, match="two planes"):
        discover(driven(use_mla=False), MODEL, MLA_CONFIG, None)


@pytest.mark.parametrize(
    ("status", "given_config", "reason"),
    [
        (driven(), None, r"pass model_config= \(.*\) or geometry="),
        (driven(), config(dtype=None), "names no dtype: pass geometry="),
        (driven(world_size=4), CONFIG, "4 tensor-parallel workers; only 1"),
        (driven(block_size=None), CONFIG, "block_size=None"),
        (driven(block_size=0), CONFIG, "block_size=0"),
        (driven(block_size="32"), CONFIG, "block_size='32'"),
    ],
)
def test_too_little_about_an_engine_driven_engine_is_refused_with_what_to_pass(
    status: dict[str, Any], given_config: ModelConfig | None, reason: str
) -> None:
    with pytest.raises(GeometryError, match=reason):
        discover(status, MODEL, given_config, None)


@pytest.mark.parametrize(
    ("use_mla", "layout"),
    [(False, "two-plane"), (True, "fused"), (True, "cpu-vec"), (True, "cpu-amx"), (True, "mla")],
)
def test_a_geometry_settles_what_an_engine_driven_engine_does_not_register(
    use_mla: bool, layout: str
) -> None:
    given = geometry(layout=layout, block_size=32)
    found = discover(driven(use_mla=use_mla), MODEL, None, given)
    assert found.geometry is given
    assert not found.assumed
    assert not found.alone


@pytest.mark.parametrize(
    ("status", "layout", "block_size"),
    [
        (driven(use_mla=False), "cpu-vec", 32),
        (driven(use_mla=False), "mla", 32),
        (driven(use_mla=True), "two-plane", 32),
        (driven(use_mla=True), "cpu-vec", 64),
        (driven(use_mla=True, block_size=None), "cpu-vec", 32),
    ],
)
def test_a_geometry_that_is_not_the_engine_driven_engines_is_a_contradiction(
    status: dict[str, Any], layout: str, block_size: int
) -> None:
    with pytest.raises(GeometryError, match="but the engine registered block_size"):
        discover(status, MODEL, None, geometry(layout=layout, block_size=block_size))


def test_a_geometry_does_not_make_several_workers_one() -> None:
    with pytest.raises(GeometryError, match="2 tensor-parallel workers"):
        discover(driven(world_size=2), MODEL, None, geometry(layout="cpu-vec", block_size=32))


def test_a_geometry_of_an_unknown_layout_is_refused() -> None:
    with pytest.raises(GeometryError, match="unknown layout 'blocked'"):
        discover(driven(), MODEL, None, geometry(layout="blocked", block_size=32))


def test_what_no_engine_registered_is_refused_and_the_registered_are_named() -> None:
    status = device(name="/models/one")
    status["non_cuda_context_meta"] = {
        "5": {"model_name": "/models/two", "world_size": 1},
        "6": {"model_name": f"{MODEL}##lmcs-1f", "world_size": 1},
        "7": {"model_name": f"{MODEL}##query", "world_size": 1},
    }
    with pytest.raises(GeometryError, match=r"Registered: '/models/one', '/models/two'\. .*`root`") as caught:
        discover(status, MODEL, CONFIG, None)
    assert "##" not in str(caught.value)
    assert repr(MODEL) in str(caught.value)


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"cache_context_meta": None, "non_cuda_context_meta": []},
        {"cache_context_meta": {"1": None}, "non_cuda_context_meta": {"1": "entry"}},
        {"cache_context_meta": {"1": {}}, "non_cuda_context_meta": {"1": {"model_name": 5}}},
    ],
    ids=str,
)
def test_where_nothing_is_registered_the_engine_is_asked_after(status: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match="none: is the engine up and connected"):
        discover(status, MODEL, CONFIG, None)


def test_a_client_of_this_library_is_no_engine() -> None:
    name = f"{MODEL}##lmcs-1f"
    with pytest.raises(GeometryError, match="no engine has registered"):
        discover(driven(model_name=name), name, CONFIG, None)


@pytest.mark.parametrize(
    "status", [{}, driven(model_name="/models/other"), driven(model_name=f"{MODEL}##lmcs-1")]
)
def test_an_explicit_geometry_needs_no_engine(status: dict[str, Any]) -> None:
    found = discover(status, MODEL, None, geometry())
    assert found.geometry == geometry()
    assert found.alone
    assert not found.assumed


def test_of_two_registrations_of_one_model_the_later_counts() -> None:
    status = device(group(dtype="torch.float16"))
    status["cache_context_meta"]["2"] = device()["cache_context_meta"]["1"]
    assert discover(status, MODEL, None, None).geometry == geometry()


def test_other_registrations_do_not_matter() -> None:
    status = device()
    status["cache_context_meta"]["2"] = {"model_name": "/models/other", "world_size": 8}
    status["non_cuda_context_meta"] = {"3": {"model_name": f"{MODEL}##lmcs-1", "world_size": 1}}
    assert discover(status, MODEL, None, None).geometry == geometry()


@pytest.mark.parametrize(
    ("before", "dtype", "after"),
    [
        (("cpu-vec", torch.float32), torch.bfloat16, "cpu-amx"),
        (("cpu-amx", torch.bfloat16), torch.float32, "cpu-vec"),
        (("cpu-vec", torch.float32), torch.float16, "cpu-vec"),
        (("two-plane", torch.float32), torch.bfloat16, "two-plane"),
        (("fused", torch.bfloat16), torch.float32, "fused"),
    ],
)
def test_a_corrected_dtype_takes_the_layout_along(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, torch.dtype], dtype: torch.dtype, after: str
) -> None:
    set_amx(monkeypatch, True)
    assumed = geometry(layout=before[0], dtype=before[1], block_size=32)
    assert with_dtype(assumed, dtype) == geometry(layout=after, dtype=dtype, block_size=32)
