"""From LMCache's names of engine formats to the layouts of this library."""

from __future__ import annotations

from ...errors import GeometryError

__all__ = ["layout_of_format"]

# The words that the names of plain formats are made of; another word (BSV, BSS: the quantised index
# of DeepSeek sparse attention) means something that the rules below do not know.
_WORDS = frozenset(("X", "NB", "NL", "NBBS", "NP", "BS", "NH", "HS", "CS", "TWO", "ONE"))
_MLA = frozenset(("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", "NL_X_NP_X_NB_BS_ONE_HS"))


def layout_of_format(engine_kv_format: str) -> str:
    """Return the layout of the chunks of an engine that registered with that format.

    LMCache's ``/status`` has the name as ``engine_kv_format`` of a kernel group (``EngineKVFormat``
    of its 0.5.6). Whatever order the engine keeps blocks, heads and tokens in, LMCache gathers them
    into one of three kinds of chunks: two planes, K and V packed into one, or a latent.

    Raises:
        GeometryError: the format is none of them.
    """
    words = engine_kv_format.split("_")
    if _WORDS.issuperset(words):
        if words[-2:] == ["TWO", "HS"] or words[-1] == "CS":
            return "fused"
        if "TWO" in words:
            return "two-plane"
        if engine_kv_format in _MLA:
            return "mla"
    raise GeometryError(
        f"engine format {engine_kv_format!r} is not supported: it is neither one with K and V "
        "(..._TWO_..., ..._TWO_HS, ..._CS) nor one of plain MLA"
    )
