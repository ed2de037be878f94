"""What is known of the engine's KV and what is only assumed, until a retrieved chunk tells."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import anyio
import torch

from .._workers import Workers
from ..errors import GeometryError
from ..rope import RopeConfig
from . import layouts
from .discovery import Discovery, with_dtype
from .layout_check import verify_layout
from .messages import ChunkMismatchError
from .model_config import ModelConfig
from .peer import Peer

logger = logging.getLogger(__name__)


class Knowledge:
    """The model's RoPE, and whether dtype and layout of its KV are sure.

    Attributes:
        is_assumed: whether dtype and layout are an assumption that no chunk has confirmed.
    """

    def __init__(
        self,
        peer: Peer,
        discovery: Discovery,
        config: ModelConfig | None,
        workers: Workers,
        *,
        max_model_len: int | None,
        rope: RopeConfig | None,
    ) -> None:
        self.is_assumed = discovery.assumed
        self._peer = peer
        self._config = config
        self._workers = workers
        self._max_model_len = max_model_len
        self._rope = rope
        self._correcting = anyio.Lock()
        self._is_checked = False

    @property
    def rope(self) -> RopeConfig:
        """The model's rotary embedding.

        Raises:
            GeometryError: no model configuration is known, or its RoPE is not supported.
        """
        if self._rope is None:
            if self._config is None:
                raise GeometryError(
                    f"the RoPE of {self._peer.model_name!r} is not known: pass model_config= to connect()"
                )
            self._rope = RopeConfig.from_model_config(self._config.raw, max_model_len=self._max_model_len)
        return self._rope

    async def correct(self, mismatch: ChunkMismatchError) -> None:
        """Take the engine's dtype over from its chunks where it was only assumed; else raise ``mismatch``."""
        peer = self._peer
        async with self._correcting:
            if peer.geometry.dtype == mismatch.dtype:
                return
            if not self.is_assumed:
                raise mismatch
            changed = with_dtype(peer.geometry, mismatch.dtype)
            if layouts.get(changed.layout).chunk_shape(changed, peer.chunk_size) != mismatch.shape:
                raise mismatch
            logger.info("the engine of %s keeps its KV in %s", peer.model_name, mismatch.dtype)
            # To its end, so that no registration is left that nobody knows of.
            await peer.background.finish(peer.register(changed))

    async def check_layout(self, kv: torch.Tensor, tokens: Sequence[int]) -> None:
        """Check retrieved KV, until it has passed once: are layout and RoPE what the engine writes?

        Raises:
            LayoutError: they are not; the message says what was measured and what would fit.
        """
        if self._is_checked:
            return
        geometry = self._peer.geometry
        try:
            rope = self.rope
        except GeometryError as error:
            # Nothing here will rotate these keys; a function of the caller's must know what it does.
            self._is_checked, self.is_assumed = True, False
            logger.warning("the KV layout %r is not checked: %s", geometry.layout, error)
            return
        size = self._peer.chunk_size
        check = functools.partial(verify_layout, kv, tokens, geometry, rope, chunk_size=size)
        if await self._workers.run(check) is None:
            logger.info("too few repeated tokens on this prompt to check the KV layout; the next may do")
        else:
            self._is_checked = True
        self.is_assumed = False
