#!/usr/bin/env python3
"""Makes the tiny GGUF files that the reader is compared with, and what the gguf package reads in them.

Usage: make_gguf.py --out DIR       (tests/golden/gguf of the repository)

Needs numpy and gguf 0.17. Output:
  types.gguf      one tensor of each type that is read, two rows of 256 elements from random blocks,
                  and a metadata value of every kind
  types.f32       little-endian float32: the tensors' values in alphabetical order of their names,
                  by gguf.quants.dequantize
"""
import argparse
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

TYPES = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K,
         T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]
# Where the half-precision numbers of a block lie: random bytes there would give infinities.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82],
          T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0],
          T.IQ4_XS: [0]}
ROWS, COLUMNS = 2, 256


def blocks_of(kind, random):
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind == T.F32:
        return random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    if kind in (T.F16, T.BF16):
        values = random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
        if kind == T.F16:
            return values.astype(np.float16)
        return gguf.quants.quantize(values, T.BF16)
    count = ROWS * COLUMNS // elements
    raw = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = random.standard_normal(count).astype(np.float16)
        raw[:, at:at + 2] = halves.view(np.uint8).reshape(count, 2)
    return raw.reshape(ROWS, -1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = pathlib.Path(parser.parse_args().out)
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(out / "types.gguf", "llama")
    writer.add_uint8("test.u8", 200)
    writer.add_int8("test.i8", -5)
    writer.add_uint16("test.u16", 60000)
    writer.add_int16("test.i16", -30000)
    writer.add_uint32("test.u32", 4000000000)
    writer.add_int32("test.i32", -2000000000)
    writer.add_uint64("test.u64", 1 << 60)
    writer.add_int64("test.i64", -(1 << 60))
    writer.add_float32("test.f32", 0.5)
    writer.add_float64("test.f64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.text", "Grüße")
    writer.add_array("test.texts", ["a", "", "über"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.25, -1.5])
    writer.add_array("test.bools", [True, False])
    values = {}
    for kind in TYPES:
        data = blocks_of(kind, random)
        name = f"{kind.name.lower()}.weight"
        values[name] = gguf.quants.dequantize(data, kind).astype("<f4").reshape(-1)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.concatenate([values[name] for name in sorted(values)]).tofile(out / "types.f32")


if __name__ == "__main__":
    main()
