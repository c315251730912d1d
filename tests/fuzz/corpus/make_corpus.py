#!/usr/bin/env python3
"""Writes the seeds of the safetensors and config fuzzers beside this script.

Usage: make_corpus.py

valid_* must be accepted and bad_* refused: tests/io/corpus_test.cpp checks that. Inputs that a fuzzer
found are added by hand as found_*; they must only not crash.
"""
import json
import pathlib
import struct

HERE = pathlib.Path(__file__).resolve().parent
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1, "I64": 8}


def safetensors(tensors, metadata=None, tail=b""):
    header, end = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        begin = end
        count = 1
        for extent in shape:
            count *= extent
        end += count * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(256))[:end] + tail


LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=80,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
             max_position_embeddings=2048, rms_norm_eps=1e-5)
QWEN2 = dict(LLAMA, architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False,
             sliding_window=64)
QWEN3 = dict(LLAMA, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32)

SAFETENSORS = {
    "valid_empty": safetensors([]),
    "valid_one": safetensors([("a", "F32", [2, 3])]),
    "valid_two_types": safetensors([("a", "F16", [4]), ("b", "BF16", [2, 2])]),
    "valid_unsupported": safetensors([("q", "I8", [5]), ("e", "F8_E4M3", [3])]),
    "valid_scalar_metadata": safetensors([("s", "F32", [])], {"format": "pt"}),
    "bad_truncated": safetensors([("a", "F32", [4])])[:-3],
    "bad_trailing": safetensors([("a", "F32", [4])], tail=b"x"),
    "bad_zero": safetensors([("a", "F32", [0, 4])]),
    "bad_lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}
CONFIG = {
    "valid_llama": LLAMA,
    "valid_llama3_rope": dict(LLAMA, rope_theta=5e5, torch_dtype="bfloat16", rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)),
    "valid_linear": dict(LLAMA, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)),
    "valid_qwen2_yarn": dict(QWEN2, eos_token_id=[2, 3], rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "valid_qwen3": dict(QWEN3, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True),
    "bad_dynamic": dict(LLAMA, rope_scaling=dict(type="dynamic", factor=2.0)),
    "bad_window": dict(QWEN2, use_sliding_window=True),
    "bad_quantised": dict(LLAMA, quantization_config=dict(quant_method="awq")),
    "bad_heads": dict(LLAMA, num_key_value_heads=3),
}


def main():
    for name, content in SAFETENSORS.items():
        path = HERE / "safetensors" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for name, content in CONFIG.items():
        path = HERE / "config" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, separators=(",", ":")))


if __name__ == "__main__":
    main()
