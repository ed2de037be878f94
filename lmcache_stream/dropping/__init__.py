"""Which tokens of a prefix to keep. Policies know of scores and indices, not of caches."""

from .hf_queries import HFQueries
from .keep import Keep, keep
from .keydiff import KeyDiff
from .knorm import KNorm
from .layers import Layers
from .policy import DropPolicy
from .prefix import CachedPrefix
from .random_drop import RandomDrop
from .rkv import RKV
from .scored import Scored
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA
from .valuediff import ValueDiff
from .wrappers import AlwaysKeep, Chain, Policy, WholeChunks

__all__ = [
    "RKV",
    "TOVA",
    "AlwaysKeep",
    "CachedPrefix",
    "Chain",
    "DropPolicy",
    "HFQueries",
    "KNorm",
    "Keep",
    "KeyDiff",
    "Layers",
    "Policy",
    "RandomDrop",
    "Scored",
    "SnapKV",
    "StreamingLLM",
    "ValueDiff",
    "WholeChunks",
    "keep",
]
