"""The engine's side: what a pass yields, and the client for vLLM's ``/v1/completions``."""

from .events import FinishEvent, PostCompletion, TokenEvent
from .models import ServedModel, find_model
from .timeouts import CompletionTimeouts
from .vllm import VLLMCompletions

__all__ = [
    "CompletionTimeouts",
    "FinishEvent",
    "PostCompletion",
    "ServedModel",
    "TokenEvent",
    "VLLMCompletions",
    "find_model",
]
