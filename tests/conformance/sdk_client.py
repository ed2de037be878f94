"""A client of ``lmcache.sdk``, run by the interpreter of the real stack; see test_sdk.

Arguments: the URLs, the model, and a folder. It retrieves the tokens of ``first.pt`` into
``read.pt``, stores the KV in ``second.pt``, and retrieves that into ``again.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lmcache.sdk import LMCacheSDKCacheKind, connect


def main(url: str, http_url: str, model: str, folder: Path) -> None:
    context = connect(LMCacheSDKCacheKind.KV, url, http_url, model, timeout=20)
    try:
        tokens = torch.load(folder / "first.pt")["tokens"]
        torch.save(context.retrieve(tokens), folder / "read.pt")
        second = torch.load(folder / "second.pt")
        if not context.store(second["kv"], second["tokens"]):
            sys.exit("the store was not committed")
        torch.save(context.retrieve(second["tokens"]), folder / "again.pt")
        if context.retrieve(second["tokens"], cache_salt="another") is not None:
            sys.exit("found under another salt")
    finally:
        context.close()


main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
