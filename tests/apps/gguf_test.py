"""GGUF files: SmolLM2-135M-Instruct, where scripts/get_model has fetched it, and broken files."""
import os
import struct
import unittest

from program import Case

SMOLLM2 = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "clo",
                       "SmolLM2-135M-Instruct.Q4_1.gguf")


@unittest.skipUnless(os.path.exists(SMOLLM2), "SmolLM2 is not there; scripts/get_model smollm2")
class SmolLm2(Case):
    def test_inspect_accounts_for_every_tensor(self):
        shown = self.succeeds("inspect", "-m", SMOLLM2).out
        for words in ("llama, 30 layers", "9 query heads, 3 KV heads, head_dim 64",
                      "272 of 272 found in 1 file", "49152 tokens", "8 bytes without a token"):
            self.assertIn(words, shown)

    def test_answers_through_its_chat_template(self):
        answer = self.succeeds("run", "-m", SMOLLM2, "-p",
                               "What is the capital of France? Answer in one sentence.",
                               "--temperature", "0", "--max-new-tokens", "30")
        self.assertEqual(answer.out.strip(), "The capital of France is Paris.")
        self.assertEqual(answer.figure("finish reason"), "stop")

    def test_offloaded_as_dense_where_the_set_covers_the_context(self):
        def text(*flags):
            return self.succeeds("run", "-m", SMOLLM2, "--raw", "-p", "Once upon a time" * 100,
                                 "--temperature", "0", "--max-new-tokens", "24", *flags).out
        self.assertEqual(text("--preset", "default", "--kv-ratio", "1", "--persistent-heads", "0"),
                         text("--preset", "dense"))


class BrokenFiles(Case):
    def gguf(self, *values, version=3, tensors=0):
        head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(values))
        return self.write("model.gguf", head + b"".join(values))

    @staticmethod
    def text(key, value):
        return (struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value)) +
                value.encode())

    def refuse(self, path, *names):
        for command in (["run", "-m", path, "-p", "x"], ["inspect", "-m", path]):
            self.refused(3, [path, *names], *command)

    def test_a_page_in_its_place(self):
        self.refuse(self.write("model.gguf", "<!DOCTYPE html>"), "not a GGUF file")

    def test_an_empty_file(self):
        self.refuse(self.write("model.gguf", b""), "not a GGUF file")

    def test_a_truncated_download(self):
        self.refuse(self.gguf(self.text("general.architecture", "llama")[:-2]), "truncated")

    def test_an_old_version(self):
        self.refuse(self.gguf(version=1), "version 1")

    def test_another_architecture(self):
        self.refuse(self.gguf(self.text("general.architecture", "mamba")), '"mamba"',
                    "llama, qwen2 and qwen3")

    def test_no_architecture(self):
        self.refuse(self.gguf(), '"general.architecture" is missing')

    def test_no_shape(self):
        self.refuse(self.gguf(self.text("general.architecture", "qwen2")),
                    '"qwen2.embedding_length" is missing')
