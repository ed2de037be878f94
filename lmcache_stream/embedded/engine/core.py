"""The engine without its HTTP: a model, its workers, its cache, and how many requests it works on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..._workers import Workers
from .answer import Answer
from .model import CausalModel
from .params import (
    CompletionParams,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    checked,
    decode_body,
    decode_completion,
    encode_text,
    refuse_other_model,
    refuse_too_long,
)
from .prefixes import PrefixCache
from .problems import BadRequestError

__all__ = ["EngineCore"]


class EngineCore:
    """Answers requests, at most ``max_num_seqs`` at a time, the others in order of arrival.

    Attributes:
        model: what answers.
        served_name: its name in the API.
        running: requests that are being worked on.
        waiting: requests that wait for their turn.
    """

    def __init__(
        self,
        model: CausalModel,
        served_name: str,
        workers: Workers,
        *,
        prefixes: PrefixCache | None,
        queries: PrefixCache | None,
        max_num_seqs: int,
    ) -> None:
        self.model = model
        self.served_name = served_name
        self.running = 0
        self.waiting = 0
        self._workers = workers
        self._prefixes = prefixes
        self._queries = queries
        self._turns = asyncio.Semaphore(max_num_seqs)

    async def read(self, body: bytes) -> tuple[CompletionRequest, CompletionParams]:
        """Decode and check a request's body.

        Raises:
            RequestError: it is refused.
        """
        # In a thread, because a long prompt takes a while.
        return await asyncio.to_thread(self._read, body)

    def _read(self, body: bytes) -> tuple[CompletionRequest, CompletionParams]:
        request = decode_completion(body)
        return request, checked(request, self.served_name, self.model)

    async def tokenize(self, body: bytes) -> list[int]:
        """Return the token ids of the text in a body.

        Raises:
            RequestError: it is refused.
        """
        return await asyncio.to_thread(self._tokenize, body)

    def _tokenize(self, body: bytes) -> list[int]:
        request = decode_body(body, TokenizeRequest)
        refuse_other_model(request.model, self.served_name)
        return encode_text(self.model, request.prompt, add_special_tokens=request.add_special_tokens)

    async def detokenize(self, body: bytes) -> str:
        """Return the text of the token ids in a body.

        Raises:
            RequestError: it is refused.
        """
        return await asyncio.to_thread(self._detokenize, body)

    def _detokenize(self, body: bytes) -> str:
        request = decode_body(body, DetokenizeRequest)
        refuse_other_model(request.model, self.served_name)
        refuse_too_long(self.model, len(request.tokens))
        unknown = next((one for one in request.tokens if one >= self.model.vocab_size), None)
        if unknown is not None:
            raise BadRequestError(f"Token id {unknown} is out of vocabulary", "tokens")
        text: str = self.model.tokenizer.decode(request.tokens)
        return text

    @asynccontextmanager
    async def answering(self, params: CompletionParams) -> AsyncIterator[Answer]:
        """Wait for a turn and give it back at the end of the block."""
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield Answer(self.model, params, self._workers, self._prefixes, self._queries)
        finally:
            self.running -= 1
            self._turns.release()
