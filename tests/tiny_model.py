"""A tiny Llama with random weights of a fixed seed, and a tokenizer of single bytes, as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EOS = 256
VOCAB_SIZE = 260


def write_tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write model and tokenizer into ``folder``; ``config`` overrides fields of the ``LlamaConfig``."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    stand_ins = _stand_ins()
    assert set(stand_ins) == set(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(stand_ins)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    untyped: Any = PreTrainedTokenizerFast
    wrapped = untyped(
        tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=["<a>", "<b>", "<c>"]
    )
    assert len(wrapped) == VOCAB_SIZE
    assert wrapped.eos_token_id == EOS
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS,
        # Wide enough for the likeliest token to stand out, so that rounding never decides.
        "initializer_range": 0.3,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**fields))
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def _stand_ins() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
