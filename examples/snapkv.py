"""SnapKV: keep what the last tokens of the prompt attend to.

    python examples/snapkv.py --picture snapkv.png

The question stands at the end of the prompt, so that its attention finds the fact that it asks for.

Everything runs in this process, with a small model; `--engine-url` and its like name real servers
instead (see the README). Needs `pip install 'lmcache-stream[embedded,examples]'`.
"""

from __future__ import annotations

import argparse

from prompts import build_prompt
from serving import add_text_arguments, make_parser, open_servers, positive, run
from telling import answer, tell_edit

import lmcache_stream as lms
from lmcache_stream.dropping import HFQueries, SnapKV
from lmcache_stream.figures import kept_figure, strips_of


async def main(args: argparse.Namespace) -> None:
    strips = []
    async with open_servers(args) as servers:
        prompt = build_prompt(servers.tokenizer, servers.cache.chunk_size, args.text, args.question)
        print(f"{len(prompt.token_ids)} tokens: {prompt.question}\n\n--- from the whole KV")
        whole = lms.create_request(servers.cache, servers.engine, prompt.token_ids)
        await answer(whole, args.max_tokens)
        # vLLM keeps no queries: a second copy of the model computes them, here, for the last tokens.
        queries = HFQueries(servers.model, window=args.window)
        for ratio in args.ratio:
            stream = lms.create_request(servers.cache, servers.engine, prompt.token_ids)
            # The engine computes the prompt's KV, which the cache server stores, and a first token.
            await stream.generate({"max_tokens": 1, "temperature": 0})
            await stream.modify_kv(SnapKV(ratio=ratio, window=args.window), queries=queries)
            strips += strips_of(stream.edits, f"SnapKV, ratio {ratio}")
            tell_edit(servers.tokenizer, prompt.token_ids, strips[-1])
            await answer(stream, args.max_tokens)
    if args.picture:
        kept_figure(strips, prompt.parts).savefig(args.picture, format="png")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_text_arguments(parser, ratios=(0.5, 0.7))
    parser.add_argument("--window", type=positive, default=32, help="last tokens whose queries vote (32)")
    run(main, parser.parse_args())
