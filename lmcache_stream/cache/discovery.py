"""What a server's status and a model's configuration say about the KV; pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import GeometryError
from . import layouts
from .geometry import KVGeometry
from .model_config import ModelConfig

# Registrations whose names carry this are clients' or query caches', not engines'.
_NO_ENGINE = "##"
AUTO = "auto"
"""The caller's word for: the layout that retrieved KV fits."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The geometry of a model's KV and how sure it is.

    Attributes:
        geometry: what to register.
        assumed: whether dtype and layout are an assumption that the first retrieved chunk must
            confirm: an engine-driven engine (vLLM on a CPU) registers neither.
        alone: whether no engine has registered the model.
        layout: the layout that the caller named, ``auto``, or None where it follows from the rest.
    """

    geometry: KVGeometry
    assumed: bool
    alone: bool
    layout: str | None = None


def discover(
    status: Mapping[str, Any],
    model_name: str,
    config: ModelConfig | None,
    given: KVGeometry | None,
    layout: str | None = None,
) -> Discovery:
    """Put together what ``/status``, the model's configuration and the caller say.

    Args:
        status: the server's.
        model_name: as the server knows it.
        config: the model's configuration, where there is one.
        given: the caller's geometry, where there is one.
        layout: the caller's layout, or ``auto`` for the one that retrieved KV fits.

    Raises:
        GeometryError: an unknown model, too little known, or a contradiction.
    """
    found = _discover(status, model_name, config, given, layout)
    if layout is None:
        return found
    if layout == AUTO:
        return replace(found, layout=AUTO)
    single_plane = layouts.get(found.geometry.layout).single_plane
    if layouts.get(layout).single_plane != single_plane:
        raise GeometryError(
            f"layout={layout!r} does not fit {model_name!r}: its engine registered "
            f"{'one plane' if single_plane else 'two planes'}"
        )
    return replace(found, geometry=replace(found.geometry, layout=layout), layout=layout)


def _discover(
    status: Mapping[str, Any],
    model_name: str,
    config: ModelConfig | None,
    given: KVGeometry | None,
    layout: str | None,
) -> Discovery:
    device, driven = _device_engines(status), _driven_engines(status)
    if model_name in device:
        found = _from_device(model_name, device[model_name], config)
        return Discovery(_agreed(found, given), assumed=False, alone=False)
    if model_name in driven:
        entry = driven[model_name]
        if given is not None:
            _check_against(given, entry, model_name)
            return Discovery(given, assumed=False, alone=False)
        return Discovery(_from_driven(model_name, entry, config, layout), assumed=True, alone=False)
    if given is not None:
        return Discovery(given, assumed=False, alone=True)
    listed = (
        ", ".join(map(repr, registered_models(status)))
        or "none: is the engine up and connected to this LMCache?"
    )
    raise GeometryError(
        f"no engine has registered the model {model_name!r} with LMCache. Registered: {listed}. "
        "The name is vLLM's model path (`root` in its /v1/models), not its served name"
    )


def registered_models(status: Mapping[str, Any]) -> list[str]:
    """Return the models that engines have registered, by their names in the cache, sorted."""
    return sorted({*_device_engines(status), *_driven_engines(status)})


def _device_engines(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return _engines(status, "cache_context_meta")


def _driven_engines(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return _engines(status, "non_cuda_context_meta")


def _engines(status: Mapping[str, Any], section: str) -> dict[str, Mapping[str, Any]]:
    entries = status.get(section)
    if not isinstance(entries, Mapping):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries.values():
        name = entry.get("model_name") if isinstance(entry, Mapping) else None
        if isinstance(name, str) and _NO_ENGINE not in name:
            # Of an engine that was restarted the later one counts; the other was not reaped yet.
            found[name] = entry
    return found


def _single_worker(entry: Mapping[str, Any], model_name: str) -> None:
    world_size = entry.get("world_size", 1)
    if world_size != 1:
        raise GeometryError(
            f"{model_name!r} is served by {world_size} tensor-parallel workers; only 1 is supported"
        )


def _from_driven(
    model_name: str, entry: Mapping[str, Any], config: ModelConfig | None, layout: str | None
) -> KVGeometry:
    _single_worker(entry, model_name)
    if config is None:
        raise GeometryError(
            f"LMCache's status does not tell the shape of {model_name!r}'s KV: pass model_config= "
            "(a Hugging Face config, its folder or config.json) or geometry="
        )
    if config.dtype is None:
        raise GeometryError(f"the configuration of {model_name!r} names no dtype: pass geometry=")
    geometry = KVGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=config.dtype,
        layout="two-plane",
        block_size=_count(entry.get("block_size"), "block_size", model_name),
    )
    if config.is_mla:
        if not entry.get("use_mla"):
            raise GeometryError(
                f"model_config= is one of MLA, but the engine registered two planes for {model_name!r}"
            )
        return replace(geometry, layout="mla")
    if not entry.get("use_mla"):
        return geometry
    # A layout that is named or to be found needs no rule for this machine.
    return replace(geometry, layout=cpu_layout(geometry) if layout is None else "fused")


def cpu_layout(geometry: KVGeometry) -> str:
    """Name the layout that vLLM's CPU engine takes for this dtype, block and head on this machine.

    Source: vLLM 0.32.0, CPU attention backend.

    Raises:
        GeometryError: not an x86 machine; the kernels of others are not known.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise GeometryError(
            f"the KV layout of vLLM's CPU engine on {platform.machine()} is not known: pass layout='auto' "
            f"to connect(), or one of {', '.join(layouts.LAYOUTS)}"
        )
    amx = bool(torch.cpu._is_amx_tile_supported())
    fits = geometry.block_size % 32 == 0 and geometry.head_size % 32 == 0
    return "cpu-amx" if amx and geometry.dtype == torch.bfloat16 and fits else "cpu-vec"


def with_dtype(geometry: KVGeometry, dtype: torch.dtype, *, layout: str | None = None) -> KVGeometry:
    """Return an assumed geometry as it is when the engine's cache turns out to be of ``dtype``."""
    changed = replace(geometry, dtype=dtype)
    if layout is None and geometry.layout.startswith("cpu-"):
        return replace(changed, layout=cpu_layout(changed))
    return changed


def _from_device(model_name: str, entry: Mapping[str, Any], config: ModelConfig | None) -> KVGeometry:
    _single_worker(entry, model_name)
    layout = entry.get("kv_cache_layout")
    groups = layout.get("kernel_groups") if isinstance(layout, Mapping) else None
    groups = groups if isinstance(groups, list) and all(isinstance(one, Mapping) for one in groups) else []
    if not isinstance(layout, Mapping) or not groups:
        raise GeometryError(f"LMCache's status gives no kv_cache_layout for {model_name!r}: pass geometry=")
    if len(groups) > 1:
        raise GeometryError(
            f"{model_name!r} has {len(groups)} groups of KV layers (a hybrid or sliding-window model): "
            "an edit by tokens cannot be right for all of them"
        )
    group = groups[0]
    name = layouts.layout_of_format(str(group.get("engine_kv_format", "")))
    dtype = getattr(torch, str(group.get("dtype", "")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise GeometryError(f"LMCache names an unknown KV dtype {group.get('dtype')!r} for {model_name!r}")
    num_layers = layout.get("num_layers")
    num_kv_heads, head_size = _heads(group, config, model_name)
    if config is not None and (num_layers, num_kv_heads, head_size) != (
        config.num_layers,
        config.num_kv_heads,
        config.head_size,
    ):
        raise GeometryError(
            f"{model_name!r}: the engine registered {num_layers} layers with {num_kv_heads} KV heads of "
            f"{head_size}, model_config= has {config.num_layers} with {config.num_kv_heads} of "
            f"{config.head_size}"
        )
    return KVGeometry(
        num_layers=_count(num_layers, "num_layers", model_name),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        layout=name,
        block_size=_count(group.get("tokens_per_block"), "tokens_per_block", model_name),
    )


def _count(value: Any, name: str, model_name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(f"LMCache reports {name}={value!r} for {model_name!r}: pass geometry=")
    return value


def _heads(group: Mapping[str, Any], config: ModelConfig | None, model_name: str) -> tuple[int, int]:
    """Read the KV heads and their size off the symbolic shape and the concrete one beside it."""
    names = _inside_brackets(group.get("engine_kv_shape"))
    sizes = _inside_brackets(group.get("engine_kv_concrete_shape"))
    if len(names) == len(sizes):
        found = dict(zip(names, sizes, strict=True))
        heads, size = found.get("NH", ""), found.get("HS", "")
        if heads.isdecimal() and size.isdecimal():
            return int(heads), int(size)
    if config is not None:
        return config.num_kv_heads, config.head_size
    raise GeometryError(f"the KV heads of {model_name!r} are not known: pass model_config= or geometry=")


def _inside_brackets(shape: Any) -> list[str]:
    _, _, rest = str(shape).partition("[")
    return [part.strip() for part in rest.rstrip("] ").split(",")]


def _agreed(found: KVGeometry, given: KVGeometry | None) -> KVGeometry:
    if given is not None and given != found:
        raise GeometryError(f"geometry= says {given}, but the engine registered {found}")
    return found


def _check_against(given: KVGeometry, entry: Mapping[str, Any], model_name: str) -> None:
    _single_worker(entry, model_name)
    single_plane = layouts.get(given.layout).single_plane
    told = (entry.get("block_size"), bool(entry.get("use_mla")))
    if told != (given.block_size, single_plane):
        raise GeometryError(
            f"geometry= says block_size {given.block_size} and layout {given.layout!r} for "
            f"{model_name!r}, but the engine registered block_size {told[0]} and "
            f"{'one fused plane' if told[1] else 'two planes'}"
        )
