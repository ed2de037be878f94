"""Answers about long documents, from KV that tokens were dropped from: what both example servers serve."""

from .answers import SSE_HEADERS, Answer
from .metrics import METRICS_TYPE
from .requests import MAX_BODY, AnswerRequest, Problem
from .service import DocumentService, Limits

__all__ = [
    "MAX_BODY",
    "METRICS_TYPE",
    "SSE_HEADERS",
    "Answer",
    "AnswerRequest",
    "DocumentService",
    "Limits",
    "Problem",
]
