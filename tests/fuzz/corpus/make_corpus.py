#!/usr/bin/env python3
"""Writes the seeds of the safetensors, config, gguf_tokenizer, profile and gates fuzzers beside this
script, and those of the tokenizer fuzzer whose names begin with "pieces".

Usage: make_corpus.py

valid_* must be accepted and bad_* refused: tests/io/corpus_test.cpp, tests/text/corpus_test.cpp and
tests/profile/corpus_test.cpp check that. Inputs that a fuzzer found are added by hand as found_*;
they must only not crash.
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
    "valid_window": dict(QWEN2, use_sliding_window=True),
    "valid_mistral": dict(LLAMA, architectures=["MistralForCausalLM"], model_type="mistral",
                          max_position_embeddings=32768),
    "bad_window": dict(QWEN3, layer_types=["full_attention", "sliding_attention"]),
    "bad_quantised": dict(LLAMA, quantization_config=dict(quant_method="awq")),
    "bad_heads": dict(LLAMA, num_key_value_heads=3),
}

SPACE = "\u2581"
BYTES = [f"<0x{b:02X}>" for b in range(256)]
SEED_TEXT = "ab  aab<tool> \u00e9\U0001F600<s>b a"


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf(values):
    """Metadata alone; lists are of strings, integers or floats by their first element."""
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        out += text(key)
        if isinstance(value, bool):
            out += struct.pack("<IB", 7, value)
        elif isinstance(value, int):
            out += struct.pack("<II", 4, value)
        elif isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        else:
            kind = {str: 8, int: 5, float: 6}[type(value[0])]
            out += struct.pack("<IIQ", 9, kind, len(value))
            for item in value:
                out += text(item) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", item)
    return out


def scored(tokens, types, scores, **more):
    return gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                 "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores,
                 "tokenizer.ggml.bos_token_id": 1,
                 **{"tokenizer.ggml." + key: value for key, value in more.items()}})


ENDS = ["<unk>", "<s>", "</s>", "<tool>"]
PIECES = [SPACE, "a", "b", "ab", "aa", SPACE + "a", "aab", SPACE * 2]
SCORES = [-9.0, -9.0, -9.0, -1.0, -1.0, -2.0, -3.0, -4.0]
GGUF_TOKENIZER = {
    "valid_unknown.gguf": scored(ENDS + PIECES, [2, 3, 3, 4] + [1] * 6 + [5, 1], [0.0] * 4 + SCORES),
    "valid_bytes.gguf": scored(ENDS + BYTES + PIECES, [2, 3, 3, 4] + [6] * 256 + [1] * 8,
                               [0.0] * 260 + SCORES, add_space_prefix=False, add_eos_token=True,
                               eos_token_id=2),
    "valid_byte_level.gguf": gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "\u0120", "\u0120a"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "\u0120 a"]}),
    "bad_scores.gguf": scored(ENDS + PIECES, [2, 3, 3, 4] + [1] * 8, SCORES),
    "bad_bytes.gguf": scored(["<s>", "</s>", "<0x41>"], [3, 3, 6], [0.0] * 3),
}


def pieces(tokens, normalizer, pre_tokenizer, **model):
    tree = {"added_tokens": [
        {"id": i, "content": c, "special": c != "<tool>", "normalized": i == 2}
        for i, c in enumerate(ENDS)],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
            "special_tokens": {"<s>": {"ids": [1]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", **model,
                  "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": [["a", "b"], ["a", "ab"], [SPACE, "a"], [SPACE, SPACE]]}}
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode() + (
        b"\0" + SEED_TEXT.encode())


METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
TOKENIZER = {
    "pieces_prepend.bin": pieces(ENDS + BYTES + PIECES, {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}, None,
        byte_fallback=True, fuse_unk=True),
    "pieces_first.bin": pieces(ENDS + PIECES, None, METASPACE, fuse_unk=True, ignore_merges=True),
    "pieces_split.bin": pieces(ENDS + PIECES, {"type": "NFC"}, dict(METASPACE, split=True)),
}


FINGERPRINT = "LlamaForCausalLM-1-8-2-1-4-0-10-default, theta 10000"


def profile(tensors, **metadata):
    """A profile of tests/fuzz/profile_model.h; values of each tensor are equal."""
    header, data = {"__metadata__": dict({"format": "clo-profile-3", "model": FINGERPRINT},
                                         **metadata)}, b""
    for name, dtype, shape, value in tensors:
        count = 1
        for extent in shape:
            count *= extent
        code = {"F32": "<f", "F16": "<e", "I8": "<b"}.get(dtype)
        one = struct.pack(code, value) if code else struct.pack("<f", value)[2:]  # BF16
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + count * len(one)]}
        data += count * one
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def floats(**tensors):
    return [(name, "F32", shape, value) for name, (shape, value) in tensors.items()]


HEADS = floats(importance=([1, 2], 0.5), difficulty=([1, 1], 0.25))
HASH = [("hash_weights", "BF16", [1, 1, 5, 64], -1.5)]
OLD_HASH = [("hash_weights", "BF16", [1, 1, 4, 64], -1.5)]
STATISTICS = floats(
    query_cosine=([1, 2, 16, 6], 0.9), query_cosine_unrotated=([1, 2, 16, 6], 0.8),
    mass_outside=([1, 2], 0.4), entropy=([1, 2], 3.5), modes=([1, 2], 2.0), set_overlap=([1, 1], 0.7),
    new_rows_on_a_miss=([1, 1], 0.3), trial_hit_rate=([1, 1, 6, 5], 0.9),
    trial_set_loss=([1, 1, 6, 5], 0.1), trial_fetched=([1, 1, 6, 5], 0.05))
RECALL = floats(**{f"{figure}_{kind}": ([1, 1], 0.6) for figure in ("recall", "weight")
                   for kind in ("random", "trained", "products")})
PROFILE = {
    "valid_none": profile([]),
    "valid_first_format": profile(HEADS + OLD_HASH, format="clo-profile-1"),
    "valid_half": profile([("importance", "F16", [1, 2], 1.0), ("other", "I8", [3], 7)]),
    "valid_whole": profile(HEADS + HASH + STATISTICS + RECALL, texts="a b", steps="12"),
    "bad_format": profile(HEADS, format="clo-profile-4"),
    "bad_model": profile(HEADS, model="another"),
    "bad_shape": profile(floats(importance=([2, 1], 0.5))),
    "bad_share": profile(floats(importance=([1, 2], 1.5))),
    "bad_value": profile(floats(difficulty=([1, 1], float("nan")))),
    "bad_type": profile([("importance", "I8", [1, 2], 1)]),
    "bad_bits": profile([("hash_weights", "BF16", [1, 1, 5, 65], 1.0)]),
    "bad_missing": profile(HEADS + STATISTICS[1:]),
}
# The first byte says the shape: 1 + b % 3 layers, 1 + b / 3 % 3 KV heads.
GATES = {
    "valid_lines": b"\x040\t0.25\n1\t0.5\n",
    "valid_spaces": b"\x07 0 2.5e-1 0.125\r\n\n1.0 0.5 1",
    "valid_json": b"\x04[[0, 0.25], [1, 0.5]]",
    "valid_one": b"\x000.75",
    "bad_layers": b"\x040 0\n",
    "bad_heads": b"\x040 0\n0\n",
    "bad_value": b"\x040 1.5\n0 0\n",
    "bad_word": b"\x040 x\n0 0\n",
    "bad_json": b"\x04[[0, 0], [0, \"1\"]]",
}


def main():
    for folder, seeds in {"profile": PROFILE, "gates": GATES}.items():
        (HERE / folder).mkdir(exist_ok=True)
        for name, content in seeds.items():
            (HERE / folder / name).write_bytes(content)
    for folder, seeds in {"gguf_tokenizer": GGUF_TOKENIZER, "tokenizer": TOKENIZER}.items():
        (HERE / folder).mkdir(exist_ok=True)
        for name, content in seeds.items():
            (HERE / folder / name).write_bytes(content)
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
