"""The model: its name in LMCache, the shape of its KV, and whether its keys can be moved."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..cache import layouts
from ..cache.discovery import discover, registered_models
from ..cache.model_config import load_model_config
from ..errors import GeometryError, LayoutError
from ..rope import RopeConfig
from .chart import Chart, known
from .results import Finding, failed, ok, warning

__all__ = ["connector", "geometry", "registered", "rope"]

_GIVE_CONFIG = "give --model-path the folder (or config.json) of the model that vLLM serves"
_GIVE_NAME = "give --model-path one of these: LMCache knows models by their path, not their served name"


def connector(chart: Chart) -> str:
    """Return how vLLM is connected to this LMCache."""
    port = chart.config.get("port") or urlsplit(chart.targets.cache_url).port
    return (
        'start vLLM with --kv-transfer-config \'{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", '
        f'"kv_connector_extra_config": {{"lmcache.mp.port": {port}}}}}\''
    )


async def registered(chart: Chart) -> Finding:
    """An engine has registered the model with this LMCache."""
    targets, served = chart.targets, chart.served_model
    names = registered_models(chart.status)
    listed = ", ".join(map(repr, names))
    if not names:
        return failed("no engine is connected to this LMCache", connector(chart))
    root = None if served is None else served.root
    wanted = [name for name in (root, targets.model_path, targets.model) if name]
    found = next((name for name in wanted if name in names), None)
    if found is None and len(names) == 1 and not chart.served and targets.model_path is None:
        # The engine, which is not there, would have told the name; the only one must be it.
        found = names[0]
    chart.cache_name = found
    if not wanted and found is None:
        return failed(f"no model was named; registered with this LMCache: {listed}", _GIVE_NAME)
    if found is None:
        seen = f"{wanted[0]!r} is not registered with this LMCache; registered: {listed}"
        if served is None:
            return failed(seen, _GIVE_NAME)
        return failed(seen, f"another vLLM is connected to it, this one is not: {connector(chart)}")
    others = "" if len(names) == 1 else f"; registered: {listed}"
    if root is not None and root != found:
        return warning(
            f"LMCache knows {found!r}, but vLLM's path is {root!r}{others}",
            f"is this vLLM the engine that is connected? If not: {connector(chart)}",
        )
    return ok(f"registered as {found!r}{others}")


async def geometry(chart: Chart) -> Finding:
    """The shape of the KV is known, and the configuration does not contradict what is registered."""
    name = known(chart.cache_name)
    try:
        chart.model_config = config = load_model_config(chart.targets.model_path, name)
    except GeometryError as error:
        return failed(str(error), _GIVE_CONFIG)
    try:
        found = discover(chart.status, name, config, None)
    except GeometryError as error:
        no_support = "; if it has been given, this engine's KV cannot be edited by tokens"
        return failed(str(error), _GIVE_CONFIG if config is None else _GIVE_CONFIG + no_support)
    shape = found.geometry
    try:
        layouts.get(shape.layout).check(shape, chart.chunk_size)
    except LayoutError as error:
        return failed(
            str(error), "start `lmcache server` with a --chunk-size that is a multiple of vLLM's --block-size"
        )
    sure = ", as far as the configuration tells" if found.assumed else ""
    return ok(
        f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_size}, "
        f"{str(shape.dtype).removeprefix('torch.')}, layout {shape.layout}{sure}"
    )


async def rope(chart: Chart) -> Finding:
    """Cached keys can be moved to other positions."""
    config, served = chart.model_config, chart.served_model
    if config is None:
        return warning(
            f"no configuration of {chart.cache_name!r} is on this machine: tokens can be dropped only by "
            "functions that rotate keys themselves",
            _GIVE_CONFIG,
        )
    length = None if served is None else served.max_model_len
    try:
        found = RopeConfig.from_model_config(config.raw, max_model_len=length)
    except GeometryError as error:
        return failed(str(error), "KV of this model can be retrieved and stored, but tokens not be dropped")
    return ok(
        f"{found.rope_type}, {found.rotary_dim} of {found.head_size} elements rotated ({found.pairing})"
    )
