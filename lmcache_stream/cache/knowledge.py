"""What is known of the engine's KV and what is only assumed, until a retrieved chunk tells."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import torch

from .._workers import Workers
from ..errors import GeometryError, LayoutError
from ..rope import RopeConfig
from . import layouts
from .discovery import AUTO, Discovery, with_dtype
from .layout_check import find_layout, verify_layout
from .messages import ChunkMismatchError
from .model_config import ModelConfig
from .peer import Peer

__all__ = ["Knowledge"]

logger = logging.getLogger(__name__)


class Knowledge:
    """The model's RoPE, and whether dtype and layout of its KV are sure.

    Attributes:
        is_assumed: whether dtype and layout are an assumption that no chunk has confirmed.
        spread: of layer 0's keys of equal tokens (see ``measure_spread``), once that was measured; None
            before, or where the check is off or could not be made.
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
        check_layout: bool,
    ) -> None:
        self.is_assumed = discovery.assumed
        self.spread: float | None = None
        self._layout = discovery.layout
        self._peer = peer
        self._config = config
        self._workers = workers
        self._max_model_len = max_model_len
        self._rope = rope
        self._correcting = anyio.Lock()
        self._is_checked = not check_layout
        self._is_warned = False

    @property
    def is_layout_open(self) -> bool:
        """Whether the layout is still to be found."""
        return self._layout == AUTO

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
            changed = with_dtype(peer.geometry, mismatch.dtype, layout=self._layout)
            if layouts.get(changed.layout).chunk_shape(changed, peer.chunk_size) != mismatch.shape:
                raise mismatch
            logger.info("the engine of %s keeps its KV in %s", peer.model_name, mismatch.dtype)
            # To its end, so that no registration is left that nobody knows of.
            await peer.background.finish(peer.register(changed))

    async def check_layout(self, chunks: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        """Check retrieved chunks, until some have passed: are layout and RoPE what the engine writes?

        Raises:
            LayoutError: they are not; the message says what was measured and what would fit. Or the layout
                is to be found and cannot be.
        """
        if self._layout == AUTO:
            await self._find_layout(chunks, tokens)
        elif not self._is_checked and layouts.get(self._peer.geometry.layout).has_planes:
            await self._verify_layout(chunks, tokens)
        self.is_assumed = False

    async def _find_layout(self, chunks: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        try:
            rope = self.rope
        except GeometryError as error:
            raise LayoutError(f"layout='auto' is found by the model's RoPE, and: {error}") from error
        found, spread = await self._workers.run(find_layout, chunks, tokens, self._peer.geometry, rope)
        self._peer.adopt_layout(found)
        self._layout, self.spread, self._is_checked = found, spread, True

    async def _verify_layout(self, chunks: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        geometry = self._peer.geometry
        try:
            rope = self.rope
        except GeometryError as error:
            # Nothing here will rotate these keys; a function of the caller's must know what it does.
            self._is_checked = True
            # Its text alone: who keeps log records would keep the server's memory mapped.
            logger.warning("the KV layout %r is not checked: %s", geometry.layout, str(error))
            return
        spread = await self._workers.run(verify_layout, chunks, tokens, geometry, rope)
        if spread is not None:
            self.spread, self._is_checked = spread, True
        elif not self._is_warned:
            self._is_warned = True
            logger.warning(
                "the KV layout %r could not be checked: too few tokens of this prompt repeat; a longer one "
                "will do",
                geometry.layout,
            )
