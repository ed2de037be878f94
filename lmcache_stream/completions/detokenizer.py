"""The engine's own detokenizer, asked over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import aiohttp
import msgspec

from ..errors import EngineError
from .exchange import Request, ask

__all__ = ["Detokenizer"]

logger = logging.getLogger(__name__)

_TIME = 2.0


class _Answer(msgspec.Struct):
    prompt: str


class Detokenizer:
    """Gives the text of token ids, special tokens included, or None where the engine cannot.

    Args:
        session: to ask with.
        request: what to ask; its body is replaced.
        model: the served model's name.
    """

    def __init__(self, session: aiohttp.ClientSession, request: Request, model: str) -> None:
        self._session = session
        self._request = request
        self._model = model
        self._texts: dict[int, str] = {}
        self._warned = False

    async def __call__(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids``; that of a single one is asked for once only."""
        single = token_ids[0] if len(token_ids) == 1 else None
        if single in self._texts:
            return self._texts[single]
        body = msgspec.json.encode({"model": self._model, "tokens": list(token_ids)})
        try:
            answer = await ask(self._session, self._request.with_body(body), _TIME)
            text = msgspec.json.decode(answer, type=_Answer).prompt
        except (EngineError, msgspec.MsgspecError) as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the first text of a pass may repeat its prompt (vllm#48853), and the engine "
                    "cannot be asked (%s); the token ids are right",
                    error,
                )
            return None
        if single is not None:
            self._texts[single] = text
        return text
