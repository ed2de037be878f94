"""Imports what a job imports when it runs, for processes that are forked from one that has done so."""

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

import lmcache_stream.cli.job

__all__ = ["AutoTokenizer", "PreTrainedModel", "PreTrainedTokenizerFast", "lmcache_stream"]
