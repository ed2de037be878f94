"""The edge between the ROUTER socket and the core: whatever comes in, it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from ..._background import Background
from ..._workers import Workers
from ...cache.messages import Frame
from .core import CacheCore, is_work
from .refusal import RefusedError
from .transfers import Steps
from .wire import decode_request, encode_reply

logger = logging.getLogger(__name__)

# Identity of the client, uid, operation.
_LEAST_FRAMES = 3


class Requests:
    """Answers the requests of one socket, in the order of their arrival.

    Only those whose bytes a thread works on are overtaken by others. An error is silence: the
    protocol has no other word for it.
    """

    def __init__(
        self, core: CacheCore, socket: zmq.asyncio.Socket, background: Background, workers: Workers
    ) -> None:
        self._core = core
        self._socket = socket
        self._background = background
        self._workers = workers

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            # What is there already is received without giving way to anybody.
            await asyncio.sleep(0)
            parts = await self._socket.recv_multipart(copy=False)
            frames = [part.buffer for part in parts]
            if len(frames) < _LEAST_FRAMES:
                logger.warning("a message of %d frames is no request: dropped", len(frames))
                continue
            identity, uid, operation = (bytes(frame) for frame in frames[:_LEAST_FRAMES])
            prefix = (identity, uid, operation)
            try:
                result = self._core.answer(decode_request([operation, *frames[_LEAST_FRAMES:]]))
                if is_work(result):
                    self._background.spawn(self._work(prefix, result))
                else:
                    await self._reply(prefix, result)
            except Exception as error:
                _log(operation, error)

    async def _work(self, prefix: tuple[bytes, bytes, bytes], work: Steps[Any]) -> None:
        try:
            await self._reply(prefix, await self._run(work))
        except Exception as error:
            _log(prefix[-1], error)

    async def _run(self, work: Steps[Any]) -> Any:
        try:
            step = next(work)
            while True:
                try:
                    outcome = await self._workers.run(step)
                except Exception as error:
                    step = work.throw(error)
                else:
                    step = work.send(outcome)
        except StopIteration as end:
            return end.value
        finally:
            # Cut short, it gives back what it holds.
            work.close()

    async def _reply(self, prefix: tuple[bytes, bytes, bytes], result: Any) -> None:
        identity, uid, operation = prefix
        frames: Sequence[Frame] = [identity, *encode_reply(uid, operation, result)]
        await self._socket.send_multipart(frames, copy=False)


def _log(operation: bytes, error: Exception) -> None:
    if isinstance(error, RefusedError):
        logger.warning("answered with silence: %s", error)
    else:
        logger.warning("answered with silence: operation %r failed", operation, exc_info=error)
