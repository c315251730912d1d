"""Models that cannot be used: each fault is named, with exit status 3."""
import os
import shutil
import struct

from program import Case, edit_json, edit_tensors, last_tensor

WEIGHTS = "model.safetensors"


def bad_model(base, *names, commands=("inspect", "run")):
    """Makes a test of a function that damages a copy of a model: both commands must refuse it, and
    name the culprit."""

    def decorate(damage):
        def test(self):
            model = self.copy(base)
            damage(model)
            for command in commands:
                prompt = ["-p", "hello"] if command == "run" else []
                self.refused(3, names, command, "-m", model, *prompt)

        return test

    return decorate


def config(**changes):
    def change(model):
        def apply(value):
            for key, new in changes.items():
                value[key] = new

        edit_json(model, "config.json", apply)

    return change


def header(change):
    return lambda model: edit_tensors(os.path.join(model, WEIGHTS), change)


def overwrite(name, content):
    def change(model):
        with open(os.path.join(model, name), "wb") as file:
            file.write(content)

    return change


def resize(name, size):
    """Cuts a file to `size` bytes, or by that many when it is negative."""

    def change(model):
        path = os.path.join(model, name)
        os.truncate(path, size if size >= 0 else os.path.getsize(path) + size)

    return change


def set_length(length):
    def change(model):
        with open(os.path.join(model, WEIGHTS), "r+b") as file:
            file.write(struct.pack("<Q", length))

    return change


def offsets(begin, end):
    def change(tensors):
        tensors["model.norm.weight"]["data_offsets"] = [begin, end]

    return header(change)


def template(text):
    return lambda model: edit_json(model, "tokenizer_config.json",
                                   lambda value: value.update(chat_template=text))


def tokenizer_model(kind):
    return lambda model: edit_json(model, "tokenizer.json",
                                   lambda value: value["model"].update(type=kind))


class Shards(Case):
    SECOND = "model-00002-of-00004.safetensors"
    INDEX = "model.safetensors.index.json"

    @bad_model("sharded", SECOND)
    def test_missing(model):
        os.remove(os.path.join(model, Shards.SECOND))

    test_truncated = bad_model("sharded", SECOND, "truncated")(resize(SECOND, -100))
    test_cut_in_the_header = bad_model("sharded", SECOND, "header")(resize(SECOND, 40))
    test_empty = bad_model("sharded", SECOND, "is empty")(resize(SECOND, 0))

    @bad_model("sharded", INDEX, "model.nonexistent.weight")
    def test_index_names_an_absent_tensor(model):
        edit_json(model, Shards.INDEX, lambda value: value["weight_map"].update(
            {"model.nonexistent.weight": "model-00001-of-00004.safetensors"}))

    @bad_model("sharded", INDEX, "../outside.safetensors")
    def test_index_leads_outside(model):
        edit_json(model, Shards.INDEX, lambda value: value["weight_map"].update(
            {"model.norm.weight": "../outside.safetensors"}))

    test_index_is_not_json = bad_model("sharded", INDEX)(overwrite(INDEX, b"{ broken"))

    @bad_model("sharded", INDEX, "is stale", "model.norm.weight", "remove the index")
    def test_index_lacks_a_tensor(model):
        edit_json(model, Shards.INDEX, lambda value: value["weight_map"].pop("model.norm.weight"))

    @bad_model("sharded", SECOND, "1 shard")
    def test_missing_without_an_index(model):
        os.remove(os.path.join(model, Shards.INDEX))
        os.remove(os.path.join(model, Shards.SECOND))

    @bad_model("sharded", "also in")
    def test_tensor_in_two_shards(model):
        shutil.copy(os.path.join(model, "model-00001-of-00004.safetensors"),
                    os.path.join(model, Shards.SECOND))


class Weights(Case):
    test_truncated = bad_model("llama3", WEIGHTS, "truncated")(resize(WEIGHTS, -1))
    test_bytes_after_the_last_tensor = bad_model("llama3", WEIGHTS, "belong to no tensor")(
        resize(WEIGHTS, 400000))

    @bad_model("llama3", WEIGHTS, "ends at byte")
    def test_offsets_past_the_file(model):
        def change(tensors):
            entry = tensors[last_tensor(tensors)]
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = [begin, end + (end - begin)]
            entry["shape"][0] *= 2

        header(change)(model)

    @bad_model("llama3", WEIGHTS, "overlap", "input_layernorm")
    def test_offsets_overlap(model):
        def change(tensors):
            tensors["model.layers.1.input_layernorm.weight"]["data_offsets"] = \
                tensors["model.layers.0.input_layernorm.weight"]["data_offsets"]

        header(change)(model)

    test_offsets_wrap = bad_model("llama3", WEIGHTS, "18446744073709551608")(
        offsets(18446744073709551608, 248))
    test_offsets_near_the_limit = bad_model("llama3", WEIGHTS, "model.norm.weight")(
        offsets(9223372036854775552, 9223372036854775807))
    test_offsets_negative = bad_model("llama3", WEIGHTS, "-256")(offsets(-256, 0))
    test_offsets_reversed = bad_model("llama3", WEIGHTS, "model.norm.weight", "data_offsets")(
        offsets(512, 256))
    test_header_longer_than_the_file = bad_model("llama3", WEIGHTS, "1099511627776")(
        set_length(1 << 40))
    test_header_length_wraps = bad_model("llama3", WEIGHTS, "18446744073709551615")(
        set_length((1 << 64) - 1))
    test_header_length_zero = bad_model("llama3", WEIGHTS, "header")(set_length(0))

    def shape(extents):
        return header(lambda t: t["model.norm.weight"].update(shape=extents))

    test_dimension_zero = bad_model("llama3", WEIGHTS, "model.norm.weight", "zero")(shape([0, 64]))
    test_dimension_negative = bad_model("llama3", WEIGHTS, "-64")(shape([-64]))
    test_dimensions_overflow = bad_model("llama3", WEIGHTS, "model.norm.weight")(
        shape([1 << 40, 1 << 40]))

    def dtype(name):
        return header(lambda t: t["model.norm.weight"].update(dtype=name))

    test_dtype_quantised = bad_model("recall", WEIGHTS, "model.norm.weight", "I16")(dtype("I16"))
    test_dtype_unknown = bad_model("recall", WEIGHTS, "model.norm.weight", "Q4_0")(dtype("Q4_0"))
    test_dtype_of_another_size = bad_model("recall", WEIGHTS, "model.norm.weight", "U8")(
        dtype("U8"))

    @bad_model("recall", "model.norm.weight", "missing")
    def test_tensor_missing(model):
        def change(tensors):
            tensors["renamed.weight"] = tensors.pop("model.norm.weight")

        header(change)(model)

    @bad_model("recall", "model.layers.0.mlp.up_proj.weight", "(fp8)", "unquantised")
    def test_fp8(model):
        def change(tensors):
            tensor = tensors["model.layers.0.mlp.up_proj.weight"]
            rows, cols = tensor["shape"]
            tensor.update(dtype="F8_E4M3", shape=[2 * rows, cols])  # as many bytes as there are

        header(change)(model)

    @bad_model("recall", "model.layers.3.mlp.up_proj.weight", "(GPTQ)", "unquantised")
    def test_gptq(model):
        def change(tensors):
            layer = "model.layers.3.mlp.up_proj"
            tensors[layer + ".qweight"] = tensors.pop(layer + ".weight")
            tensors[layer + ".g_idx"] = tensors.pop("model.layers.3.mlp.down_proj.weight")

        header(change)(model)

    @bad_model("recall", "lm_head.weight", "tie_word_embeddings", "true")
    def test_head_missing(model):
        edit_json(model, "config.json", lambda value: value.update(tie_word_embeddings=False))

    test_lfs_pointer = bad_model("llama3", WEIGHTS, "Git LFS")(overwrite(
        WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 290136\n"))
    test_html_page = bad_model("llama3", WEIGHTS, "HTML")(overwrite(
        WEIGHTS, b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"))
    test_gguf_inside = bad_model("llama3", WEIGHTS, "GGUF")(overwrite(
        WEIGHTS, b"GGUF\x03\x00\x00\x00" + bytes(64)))
    test_empty = bad_model("llama3", WEIGHTS, "is empty")(resize(WEIGHTS, 0))

    @bad_model("llama3", "pytorch_model.bin", "safetensors", "save_pretrained")
    def test_pickle_beside(model):
        os.rename(os.path.join(model, WEIGHTS), os.path.join(model, "pytorch_model.bin"))

    test_pickle_inside = bad_model("llama3", WEIGHTS, "pickle")(overwrite(
        WEIGHTS, b"PK\x03\x04" + bytes(100)))

    @bad_model("llama3", "no weights", WEIGHTS)
    def test_missing(model):
        os.remove(os.path.join(model, WEIGHTS))

    @bad_model("llama3", WEIGHTS)
    def test_broken_link(model):
        os.remove(os.path.join(model, WEIGHTS))
        os.symlink("nowhere", os.path.join(model, WEIGHTS))


class Config(Case):
    FILE = "config.json"

    @bad_model("llama3", "config.json")
    def test_missing(model):
        os.remove(os.path.join(model, Config.FILE))

    test_not_json = bad_model("llama3", FILE)(overwrite(FILE, b"{\"hidden_size\": "))
    test_not_an_object = bad_model("llama3", FILE)(overwrite(FILE, b"[1, 2]"))
    test_html = bad_model("llama3", FILE, "HTML")(overwrite(FILE, b"<html>404</html>"))
    test_unknown_architecture = bad_model("llama3", FILE, "MixtralForCausalLM", "LlamaForCausalLM")(
        config(architectures=["MixtralForCausalLM"], model_type="mixtral"))
    test_unknown_rope_type = bad_model("llama3", FILE, "longrope")(
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}))
    test_dynamic_ntk = bad_model("llama3", FILE, "dynamic")(
        config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}))
    test_unknown_rope_key = bad_model("llama3", FILE, "mystery_factor")(
        config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0,
                                "mystery_factor": 3.0}))
    test_activation = bad_model("llama3", FILE, "hidden_act", "gelu")(config(hidden_act="gelu"))
    test_quantised = bad_model("llama3", FILE, "quantization_config", "gptq")(
        config(quantization_config={"quant_method": "gptq", "bits": 4}))
    test_fp8 = bad_model("llama3", FILE, "quantization_config", "fp8")(
        config(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}))
    test_awq = bad_model("llama3", FILE, "quantization_config", "awq")(
        config(quantization_config={"quant_method": "awq", "bits": 4}))
    test_bitsandbytes = bad_model("llama3", FILE, "quantization_config", "bitsandbytes")(
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}))
    test_sliding_window = bad_model("qwen2", "sliding_window is 512", "--context 512 or less")(
        config(sliding_window=512, use_sliding_window=True,
               layer_types=["full_attention", "sliding_attention"]))
    test_sliding_layers = bad_model("qwen2", FILE, "sliding_attention")(
        config(layer_types=["full_attention", "sliding_attention"]))
    test_size_zero = bad_model("llama3", FILE, "num_hidden_layers", "found 0")(
        config(num_hidden_layers=0))
    test_size_huge = bad_model("llama3", FILE, "hidden_size")(config(hidden_size=1 << 62))
    test_size_text = bad_model("llama3", FILE, "hidden_size")(config(hidden_size="64"))
    test_heads_do_not_divide = bad_model("llama3", FILE, "num_key_value_heads")(
        config(num_key_value_heads=3))
    test_shapes_disagree = bad_model("recall", WEIGHTS, "704", "720", FILE)(
        config(intermediate_size=720))
    test_fewer_layers_in_the_file = bad_model("recall", "model.layers.8", "missing")(
        config(num_hidden_layers=9))

    def test_context_within_the_window_is_accepted(self):
        model = self.copy("recall")
        config(sliding_window=512, use_sliding_window=True, layer_types=None)(model)
        self.succeeds("inspect", "-m", model, "--context", "512")
        self.refused(3, ["sliding_window is 512"], "inspect", "-m", model, "--context", "513")

    def test_switched_off_window_is_accepted(self):
        model = self.copy("recall")
        config(sliding_window=512, use_sliding_window=False)(model)
        self.succeeds("inspect", "-m", model)


class GenerationConfig(Case):
    """Values the sampler has no use for are the file's fault, not a flag's."""

    FILE = "generation_config.json"

    test_temperature = bad_model("llama3", FILE, "temperature", "1000")(
        overwrite(FILE, b'{"do_sample": true, "temperature": 1000}'))
    test_top_p = bad_model("llama3", FILE, "top_p", "above 0")(
        overwrite(FILE, b'{"do_sample": true, "top_p": 0}'))
    test_penalty = bad_model("llama3", FILE, "repetition_penalty")(
        overwrite(FILE, b'{"do_sample": true, "repetition_penalty": 500.0}'))


class TokenizerFiles(Case):
    FILE = "tokenizer.json"

    @bad_model("llama3", FILE)
    def test_missing(model):
        os.remove(os.path.join(model, TokenizerFiles.FILE))

    @bad_model("llama3", "SentencePiece", "tokenizer.model")
    def test_sentencepiece(model):
        os.rename(os.path.join(model, TokenizerFiles.FILE), os.path.join(model, "tokenizer.model"))

    test_unigram = bad_model("llama3", FILE, "Unigram", "BPE")(tokenizer_model("Unigram"))
    test_wordpiece = bad_model("llama3", FILE, "WordPiece", "BPE")(tokenizer_model("WordPiece"))
    test_not_json = bad_model("llama3", FILE)(overwrite(FILE, b"{"))
    test_html = bad_model("llama3", FILE, "HTML")(overwrite(FILE, b"<html>404</html>"))
    test_more_ids_than_the_model = bad_model("llama3", "4095", "127", FILE)(lambda model: None)
    test_template_syntax = bad_model("recall", "tokenizer_config.json", "line 3")(
        template("{{ bos_token }}\n{% for m in messages %}\n{% if %}\n"))
    test_template_unsupported = bad_model("recall", "tokenizer_config.json", "import", "line 2")(
        template("hello\n{% import 'other' as x %}\n"))

    def test_template_that_raises(self):
        model = self.copy("recall")
        template("{{ raise_exception('only cats may ask') }}")(model)
        self.refused(3, ["only cats may ask"], "run", "-m", model, "-p", "hello")


class ModelPaths(Case):
    def refuse(self, path, *names):
        for command in ("inspect", "run", "demo"):
            self.refused(3, [os.path.basename(path), *names], command, "-m", path)

    def test_missing(self):
        self.refuse(self.path("nowhere"), "does not exist")

    def test_empty_folder(self):
        os.mkdir(self.path("empty"))
        self.refuse(self.path("empty"), "config.json")

    def test_gguf_file(self):
        self.refuse(self.write("some.gguf", b"GGUF" + bytes(64)), "GGUF file of version 0")

    def test_safetensors_file(self):
        self.refuse(self.write("some.safetensors", bytes(64)), "is a file", "config.json")

    def test_pickle_file(self):
        self.refuse(self.write("some.bin", bytes(64)), "pickle")

    def test_device(self):
        self.refuse("/dev/null", "model directory")

    def test_gguf_folder(self):
        os.mkdir(self.path("models"))
        self.write("models/a-00002-of-00002.gguf", b"GGUF" + bytes(64))
        self.refuse(self.path("models"), "a-00001-of-00002.gguf", "not the first")
        self.write("models/b.gguf", b"GGUF" + bytes(64))
        self.refuse(self.path("models"), "2 GGUF models", "b.gguf")

    def test_hub_cache_folder(self):
        snapshot = self.path("models--a--b/snapshots/0123abcd")
        os.makedirs(snapshot)
        os.makedirs(self.path("models--a--b/refs"))
        self.write("models--a--b/refs/main", "0123abcd\n")
        for name in os.listdir(self.recall):
            os.symlink(os.path.join(self.recall, name), os.path.join(snapshot, name))
        self.assertIn("0123abcd", self.succeeds("inspect", "-m", self.path("models--a--b")).out)
        self.write("models--a--b/refs/main", "ffffffff\n")
        self.refuse(self.path("models--a--b"), "ffffffff")
