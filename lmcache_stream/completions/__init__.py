"""The engine's side: what a pass yields, and the client for vLLM's ``/v1/completions``."""

from .events import FinishEvent, PostCompletion, TokenEvent
from .timeouts import CompletionTimeouts
from .vllm import VLLMCompletions

__all__ = [
    "CompletionTimeouts",
    "FinishEvent",
    "PostCompletion",
    "TokenEvent",
    "VLLMCompletions",
]
