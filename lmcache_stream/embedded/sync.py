"""The embedded stack without ``await``."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from .. import sync as lms
from .stack import StackBase

__all__ = ["EmbeddedStack"]


class EmbeddedStack(StackBase):
    """``lmcache_stream.embedded.EmbeddedStack`` for ``with``; same arguments, names of ``sync``."""

    _completions: lms.VLLMCompletions | None = None

    @property
    def post_completion(self) -> lms.VLLMCompletions:
        """The engine, for ``create_request``; it closes with the stack."""
        self._running()
        assert self._completions is not None
        return self._completions

    def connect(self, **options: Any) -> lms.LMCacheContext:
        """Connect to the cache server; ``options`` are those of ``lmcache_stream.sync.connect``."""
        return lms.connect(**{**self._connection(), **options})

    def __enter__(self) -> Self:
        started = self._thread.start()
        try:
            self._servers = started.result()
            self._completions = lms.VLLMCompletions(self.engine_url, self.model_name)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop both servers; idempotent."""
        completions, self._completions = self._completions, None
        self._servers = None
        try:
            if completions is not None:
                completions.close()
        finally:
            self._thread.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
