#!/usr/bin/env python3
"""Makes the tiny models and the golden logits that the engine is compared with.

Usage: make_models.py --out DIR --repo DIR [--only NAME ...]
       make_models.py --list

Needs torch, transformers 5.x, safetensors and tokenizers; --list needs none of them. Everything runs
on the CPU in a few minutes. The output goes to tests/golden/models/ of the repository:

  <name>/config.json, generation_config.json, model*.safetensors   random weights, float32
  <name>/golden.safetensors                                         what transformers computes (below)
  recall-7m/golden.safetensors                                      the same for models/recall-7m
  rope/<case>.json, rope/golden.safetensors                         rotary frequencies of real settings

A golden file holds float32 tensors only (ids as floats, all below 2^24), T tokens, P positions:
  ids [T], positions [P], greedy [16], inv_freq [head_dim/2], attention_factor [1],
  logits [P, vocab]        eager attention, float32 weights and arithmetic
  logits_bf16 [P, vocab]   eager attention, bfloat16 weights and arithmetic, rotary tables in float32
The ids are chosen so that every greedy step wins by at least GREEDY_MARGIN (tiny models only; the
margin that was reached is in the metadata).
"""
import argparse
import json
import pathlib
import sys

NUM_TOKENS = 600
POSITIONS = [0, 1, 63, 64, 65, 255, 256, 257, 511, 599]
RECALL_TOKENS = 3000
RECALL_POSITIONS = [0, 1, 255, 256, 257, 2047, 2999]
NUM_GREEDY = 16
GREEDY_MARGIN = 0.02
# Weights are multiples of what bfloat16 can hold, so that a difference in bfloat16 is one of
# arithmetic; at 0.2 the random attention was so sharp that the library's own bfloat16 logits were
# up to 5e-3 (1 - cosine) from its float32 ones.
INIT_STD = 0.1
MAX_MODEL_BYTES = 310_000
MAX_TOTAL_BYTES = 12 * 1024 * 1024

SHAPE = dict(hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=128, max_position_embeddings=2048,
             rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)

# family: class prefix in transformers. shape: changes to SHAPE. rope: rope_parameters.
# legacy: config.json is rewritten with the keys of transformers 4 (rope_theta, rope_scaling,
# torch_dtype), so that both spellings are read. shard: max_shard_size of save_pretrained.
MODELS = {
    "llama3": dict(family="Llama", rope=dict(rope_type="default", rope_theta=500000.0)),
    "llama31": dict(family="Llama", legacy=True, shape=dict(eos_token_id=[2, 3]),
                    rope=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                              high_freq_factor=4.0, original_max_position_embeddings=64)),
    "llama_linear": dict(family="Llama", shape=dict(num_hidden_layers=3, intermediate_size=48,
                                                    tie_word_embeddings=True),
                         rope=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama_tied": dict(family="Llama", legacy=True,
                       shape=dict(num_hidden_layers=3, intermediate_size=48, tie_word_embeddings=True),
                       rope=dict(rope_type="default", rope_theta=10000.0)),
    "qwen2": dict(family="Qwen2", legacy=True, shape=dict(tie_word_embeddings=True, rms_norm_eps=1e-6),
                  rope=dict(rope_type="default", rope_theta=1000000.0)),
    "qwen2_yarn": dict(family="Qwen2", shape=dict(rms_norm_eps=1e-6),
                       rope=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                 original_max_position_embeddings=64)),
    "qwen3": dict(family="Qwen3", shape=dict(head_dim=32, intermediate_size=32, tie_word_embeddings=True,
                                             rms_norm_eps=1e-6),
                  rope=dict(rope_type="default", rope_theta=1000000.0)),
    "qwen3_group3": dict(family="Qwen3",
                         shape=dict(head_dim=16, num_attention_heads=6, intermediate_size=64,
                                    rms_norm_eps=1e-6),
                         rope=dict(rope_type="default", rope_theta=1000000.0)),
    "sharded": dict(family="Llama", shard="100KB", rope=dict(rope_type="default", rope_theta=10000.0)),
}

# Rotary settings of published models and the corners of YaRN; no weights.
ROPE_CASES = {
    "llama31_8b": dict(head_dim=128, max_position_embeddings=131072,
                       rope=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "llama32_1b": dict(head_dim=64, max_position_embeddings=131072,
                       rope=dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "llama2_linear": dict(head_dim=128, max_position_embeddings=4096,
                          rope=dict(rope_type="linear", rope_theta=10000.0, factor=8.0)),
    "default_head_80": dict(head_dim=80, max_position_embeddings=4096,
                            rope=dict(rope_type="default", rope_theta=10000.0)),
    "qwen25_yarn": dict(head_dim=128, max_position_embeddings=32768,
                        rope=dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0,
                                  original_max_position_embeddings=32768)),
    "yarn_original_implied": dict(head_dim=128, max_position_embeddings=32768,
                                  rope=dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0)),
    "yarn_mscale": dict(head_dim=64, max_position_embeddings=163840,
                        rope=dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0,
                                  beta_slow=1.0, mscale=1.0, mscale_all_dim=0.707,
                                  original_max_position_embeddings=4096)),
    "yarn_mscale_alone": dict(head_dim=64, max_position_embeddings=163840,
                              rope=dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=0.5,
                                        original_max_position_embeddings=4096)),
    "yarn_no_truncate": dict(head_dim=64, max_position_embeddings=131072,
                             rope=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0,
                                       beta_slow=1.0, truncate=False,
                                       original_max_position_embeddings=4096)),
    "yarn_betas_factor": dict(head_dim=128, max_position_embeddings=131072,
                              rope=dict(rope_type="yarn", rope_theta=1000000.0, factor=8.0, beta_fast=16.0,
                                        beta_slow=2.0, attention_factor=1.25,
                                        original_max_position_embeddings=16384)),
    "yarn_short": dict(head_dim=16, max_position_embeddings=256,
                       rope=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                 original_max_position_embeddings=64)),
}


def randomise(model, seed):
    """Weights large enough that logits, norms and biases all matter; none is left at its default."""
    import torch
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_((1.0 + 0.3 * noise).to(torch.bfloat16))
            else:
                parameter.copy_((INIT_STD * noise).to(torch.bfloat16))


def save_tiny_model(name, folder):
    import torch
    import transformers
    spec = MODELS[name]
    shape = dict(SHAPE, **spec.get("shape", {}))
    config = getattr(transformers, spec["family"] + "Config")(rope_parameters=dict(spec["rope"]), **shape)
    model = getattr(transformers, spec["family"] + "ForCausalLM")(config).to(torch.float32)
    randomise(model, seed=1000 + sorted(MODELS).index(name))
    model.save_pretrained(folder, max_shard_size=spec.get("shard", "1GB"))
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    if spec.get("legacy"):
        rope = dict(settings.pop("rope_parameters"))
        settings["rope_theta"] = rope.pop("rope_theta")
        settings["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
        settings["torch_dtype"] = settings.pop("dtype", "float32")
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    num_bytes = sum(p.stat().st_size for p in folder.glob("model*.safetensors"))
    if num_bytes > MAX_MODEL_BYTES:
        sys.exit(f"{name}: {num_bytes} bytes of weights, at most {MAX_MODEL_BYTES} are allowed")
    has_index = (folder / "model.safetensors.index.json").exists()
    if has_index != ("shard" in spec):
        sys.exit(f"{name}: sharding came out wrong (index: {has_index})")


def load(folder, dtype):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype,
                                                              attn_implementation="eager")
    return model.eval()


def logits_of(model, ids):
    import torch
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy_of(model, ids, first_logits):
    """Next tokens by argmax, each from a full forward pass; also the smallest lead of a winner."""
    ids, margin, logits = list(ids), float("inf"), first_logits
    chosen = []
    for step in range(NUM_GREEDY):
        if step:
            logits = logits_of(model, ids)[-1]
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        chosen.append(int(logits.argmax()))
        ids.append(chosen[-1])
    return chosen, margin


def write_golden(folder, source, ids_of_attempt, positions, num_attempts):
    import torch
    from safetensors.torch import save_file
    model = load(source, torch.float32)
    for attempt in range(num_attempts):
        ids = ids_of_attempt(attempt)
        logits = logits_of(model, ids)
        greedy, margin = greedy_of(model, ids, logits[-1])
        if margin >= GREEDY_MARGIN:
            break
    else:
        if num_attempts > 1:
            sys.exit(f"{source}: no ids with a greedy margin of {GREEDY_MARGIN}")
    rotary = model.model.rotary_emb
    inv_freq = rotary.inv_freq.detach().clone().float()

    half = load(source, torch.bfloat16)
    # A cast of the whole model would round the rotary table to 8 bits; serving stacks keep it f32.
    half.model.rotary_emb.inv_freq = inv_freq.clone()
    if half.model.rotary_emb.inv_freq.dtype != torch.float32:
        sys.exit(f"{source}: the rotary table of the bf16 model is not float32")
    if half.lm_head.weight.dtype != torch.bfloat16:
        sys.exit(f"{source}: the bf16 model is not bf16")
    logits_bf16 = logits_of(half, ids)

    for tensor in (logits, logits_bf16):
        if not torch.isfinite(tensor).all():
            sys.exit(f"{source}: logits are not finite")
    scale = logits[positions].std().item()
    gap = (logits[positions] - logits_bf16[positions]).abs().max().item()
    if scale < 0.3:
        sys.exit(f"{source}: logits have standard deviation {scale:.3f}: too flat to test anything")
    folder.mkdir(parents=True, exist_ok=True)
    as_floats = lambda values: torch.tensor(values, dtype=torch.float32)
    save_file({
        "ids": as_floats(ids),
        "positions": as_floats(positions),
        "greedy": as_floats(greedy),
        "logits": logits[positions].contiguous(),
        "logits_bf16": logits_bf16[positions].contiguous(),
        "inv_freq": inv_freq,
        "attention_factor": as_floats([float(rotary.attention_scaling)]),
    }, str(folder / "golden.safetensors"), metadata=versions() | {"greedy_margin": f"{margin:.4f}"})
    print(f"{folder.name:<14} logit std {scale:6.3f}   max |f32 - bf16| {gap:6.3f}   "
          f"greedy margin {margin:.4f}   attempts {attempt + 1}", flush=True)


def versions():
    import torch
    import transformers
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def tiny_ids(name):
    def ids_of_attempt(attempt):
        import torch
        seed = 77_000 + 100 * sorted(MODELS).index(name) + attempt
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, SHAPE["vocab_size"], (NUM_TOKENS,), generator=generator).tolist()
    return ids_of_attempt


def recall_ids(repo):
    import tokenizers
    text = (repo / "LICENSE").read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_file(str(repo / "models" / "recall-7m" / "tokenizer.json"))
    ids = tokenizer.encode(text + text, add_special_tokens=False).ids[:RECALL_TOKENS]
    if len(ids) != RECALL_TOKENS:
        sys.exit(f"LICENSE gives {len(ids)} tokens, {RECALL_TOKENS} are needed")
    return ids


def write_rope_cases(folder):
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, case in ROPE_CASES.items():
        shape = dict(SHAPE, head_dim=case["head_dim"],
                     max_position_embeddings=case["max_position_embeddings"])
        config = transformers.LlamaConfig(rope_parameters=dict(case["rope"]), **shape)
        rotary = LlamaRotaryEmbedding(config=config)
        tensors[f"{name}.inv_freq"] = rotary.inv_freq.detach().clone().float()
        tensors[f"{name}.attention_factor"] = torch.tensor([float(rotary.attention_scaling)])
        settings = dict(shape, architectures=["LlamaForCausalLM"], model_type="llama",
                        hidden_act="silu", dtype="float32", rope_parameters=case["rope"])
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    save_file(tensors, str(folder / "golden.safetensors"), metadata=versions())
    print(f"rope           {len(ROPE_CASES)} cases", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="folder to write to")
    parser.add_argument("--repo", type=pathlib.Path, help="root of the repository")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="make only these")
    parser.add_argument("--list", action="store_true", help="print what would be made")
    options = parser.parse_args()
    names = list(MODELS) + ["recall-7m", "rope"]
    if options.list:
        for name in names:
            spec = MODELS.get(name)
            print(f"{name:<14} " + (f"{spec['family']} {json.dumps(spec['rope'])}" if spec else ""))
        return
    if not options.out or not options.repo:
        parser.error("--out and --repo are needed")
    unknown = set(options.only or []) - set(names)
    if unknown:
        parser.error(f"unknown names: {', '.join(sorted(unknown))}; --list prints the known ones")
    import torch
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    for name in options.only or names:
        folder = options.out / name
        if name == "rope":
            write_rope_cases(folder)
        elif name == "recall-7m":
            ids = recall_ids(options.repo)
            write_golden(folder, options.repo / "models" / "recall-7m", lambda attempt: ids,
                         RECALL_POSITIONS, num_attempts=1)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            save_tiny_model(name, folder)
            write_golden(folder, folder, tiny_ids(name), POSITIONS, num_attempts=64)
    total = sum(p.stat().st_size for p in options.out.rglob("*") if p.is_file())
    print(f"{total} bytes in {options.out}")
    if total > MAX_TOTAL_BYTES:
        sys.exit(f"more than {MAX_TOTAL_BYTES} bytes: too much to commit")


if __name__ == "__main__":
    main()
