"""What the server says of itself over HTTP, under the names of LMCache 0.5.6."""

from __future__ import annotations

from typing import Any

from ...cache.geometry import KVGeometry
from .core import CacheCore
from .options import CacheOptions


def status_of(core: CacheCore) -> dict[str, Any]:
    """Return ``/status``."""
    announced = core.clients.announced
    options = core.options
    clients = core.clients.all()
    l1 = _l1(core)
    eviction = {"is_healthy": True, "thread_alive": True, **_eviction(options)}
    return {
        "is_healthy": True,
        "engine_type": "EmbeddedCacheServer",
        "chunk_size": options.chunk_size,
        "hash_algorithm": "blake2b",
        "active_sessions": len(core.sessions),
        "storage_manager": {
            "is_healthy": True,
            "l1_managers": {"_default": l1},
            "l1_manager": l1,
            "l1_eviction_controllers": {"_default": eviction},
            "l1_eviction_controller": eviction,
            "l2_adapters": [],
            "num_l2_adapters": 0,
            "l1_usage": [core.store.used_bytes, options.size_bytes],
            "l1_capacity_bytes_by_backend": {"dram": options.size_bytes},
        },
        "active_prefetch_jobs": core.lookups.open,
        "worker_liveness": {
            "enabled": True,
            "reap_timeout_seconds": options.reap_timeout,
            "registration_grace_seconds": options.registration_grace,
            "tracked_instances": len(clients),
        },
        "kv_events": {"enabled": False},
        "registered_gpu_ids": list(range(len(announced))),
        "cache_context_meta": {
            str(number): _device_engine(name, geometry)
            for number, (name, geometry) in enumerate(announced.items())
        },
        "registered_non_cuda_instance_ids": list(clients),
        "non_cuda_context_meta": {
            str(instance_id): {
                "model_name": client.registration.model_name,
                "world_size": client.registration.world_size,
                "block_size": client.registration.block_size,
                "use_mla": client.registration.use_mla,
            }
            for instance_id, client in clients.items()
        },
    }


def config_of(core: CacheCore, *, host: str, port: int, http_port: int) -> dict[str, Any]:
    """Return ``/config``."""
    options = core.options
    return {
        "mp": {
            "transport": "zmq",
            "host": host,
            "port": port,
            "chunk_size": options.chunk_size,
            "hash_algorithm": "blake2b",
            "engine_type": "default",
            "supported_transfer_mode": "auto",
            "shm_name": core.pool.shm_name,
            "worker_reap_timeout_seconds": options.reap_timeout,
            "session_ttl_seconds": options.session_ttl,
            "worker_registration_grace_seconds": options.registration_grace,
        },
        "storage_manager": {
            "l1_manager_config": {
                "memory_config": {
                    "size_in_bytes": options.size_bytes,
                    "use_lazy": not core.pool.shm_name,
                    "shm_name": core.pool.shm_name,
                },
                "write_ttl_seconds": options.write_ttl,
                "read_ttl_seconds": options.read_ttl,
            },
            "eviction_config": _eviction(options),
        },
        "http": {"http_host": host, "http_port": http_port},
    }


def _l1(core: CacheCore) -> dict[str, Any]:
    counts, options = core.store.counts(), core.options
    used = core.store.used_bytes
    return {
        "is_healthy": True,
        "total_object_count": counts.resident + counts.staged,
        "write_locked_count": counts.write_locked,
        "read_locked_count": counts.read_locked,
        "temporary_count": 0,
        "staging_object_count": counts.staged,
        "staging_bytes": counts.staged_bytes,
        "memory_used_bytes": used,
        "memory_total_bytes": options.size_bytes,
        "memory_configured_bytes": options.size_bytes,
        "capacity_bytes_by_backend": {"dram": options.size_bytes},
        "memory_usage_ratio": used / options.size_bytes,
        "write_ttl_seconds": options.write_ttl,
        "read_ttl_seconds": options.read_ttl,
    }


def _eviction(options: CacheOptions) -> dict[str, Any]:
    return {
        "eviction_policy": "LRU",
        "trigger_watermark": options.trigger_watermark,
        "eviction_ratio": options.eviction_ratio,
    }


def _device_engine(model_name: str, geometry: KVGeometry) -> dict[str, Any]:
    heads, size, block = geometry.num_kv_heads, geometry.head_size, geometry.block_size
    group = {
        "layer_indices": list(range(geometry.num_layers)),
        "num_layers": geometry.num_layers,
        "dtype": str(geometry.dtype),
        "tokens_per_block": block,
        "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
        "engine_kv_shape": "NL x [NB, 2, NH, BS, HS]",
        "engine_kv_concrete_shape": f"{geometry.num_layers} x [1, 2, {heads}, {block}, {size}]",
    }
    return {
        "model_name": model_name,
        "world_size": geometry.world_size,
        "kv_cache_layout": {"num_layers": geometry.num_layers, "kernel_groups": [group]},
    }
