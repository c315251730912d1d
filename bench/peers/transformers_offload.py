#!/usr/bin/env python3
"""What transformers does with the same shape: random weights, a cache filled with random rows.

Usage: transformers_offload.py decode|prefill [--context N] [--tokens N] [-o FILE]
decode  seconds per token with the offloaded cache and with the cache on the GPU
prefill seconds to the first token: one shot and in chunks, with the attention kernels there are
Appends JSON lines. Needs torch and transformers; the shape is Llama-3-8B's.
"""
import argparse
import json
import statistics
import time

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def make_model():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, rope_theta=500000.0,
        max_position_embeddings=1 << 20, attn_implementation="sdpa", dtype=torch.bfloat16)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def filled_cache(model, context, offloaded):
    cache = DynamicCache(config=model.config, offloading=offloaded)
    for layer in range(model.config.num_hidden_layers):
        rows = [torch.randn(1, 8, context, 128, dtype=torch.bfloat16, device="cuda")
                for _ in range(2)]
        cache.update(rows[0], rows[1], layer)
    torch.cuda.synchronize()
    return cache


@torch.no_grad()
def decode(model, context, tokens, offloaded):
    cache = filled_cache(model, context, offloaded)
    ids = torch.tensor([[1]], device="cuda")
    seconds = []
    for i in range(tokens + 1):
        start = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True)
        ids = out.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        if i > 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@torch.no_grad()
def prefill(model, context, chunk, backend):
    ids = torch.randint(0, 128256, (1, context), device="cuda")
    cache = DynamicCache(config=model.config)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with sdpa_kernel([backend]):
        for first in range(0, context, chunk):
            out = model(ids[:, first:first + chunk], past_key_values=cache, use_cache=True,
                        logits_to_keep=1)
    out.logits[:, -1].argmax(-1).item()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["decode", "prefill"])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    model = make_model()
    lines = []
    base = {"kind": "peer", "peer": f"transformers {transformers.__version__}",
            "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "shape": "llama3-8b", "context": args.context, "bench": args.what}
    if args.what == "decode":
        for offloaded in (True, False):
            seconds = decode(model, args.context, args.tokens, offloaded)
            lines.append(base | {"cache": "offloaded" if offloaded else "on the GPU",
                                 "tokens": args.tokens, "seconds_per_token": seconds})
            print(json.dumps(lines[-1]), flush=True)
            torch.cuda.empty_cache()
    else:
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION),
                              ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            for chunk in (args.context, 16384):
                try:
                    seconds = prefill(model, args.context, chunk, backend)
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    line = base | {"attention": name, "chunk": chunk, "error": str(error)[:200]}
                else:
                    line = base | {"attention": name, "chunk": chunk, "seconds": seconds}
                lines.append(line)
                print(json.dumps(line), flush=True)
                torch.cuda.empty_cache()
    if args.output:
        with open(args.output, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
