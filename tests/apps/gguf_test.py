"""GGUF files: SmolLM2-135M-Instruct, where scripts/get_model has fetched it, whole and in parts, and
broken files."""
import os
import struct
import unittest

from program import Case

SMOLLM2 = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "clo",
                       "SmolLM2-135M-Instruct.Q4_1.gguf")


ALIGNMENT = 32
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def padding(count):
    return bytes(-count % ALIGNMENT)


class Reader:
    def __init__(self, content):
        self.content, self.at = content, 4

    def take(self, form):
        values = struct.unpack_from("<" + form, self.content, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0]

    def text(self):
        length = self.take("Q")
        self.at += length
        return self.content[self.at - length:self.at].decode()

    def skip_value(self, kind):
        if kind == 8:
            self.text()
        elif kind == 9:
            of, count = self.take("I"), self.take("Q")
            for _ in range(count if of == 8 else 0):
                self.text()
            self.at += 0 if of == 8 else count * VALUE_BYTES[of]
        else:
            self.at += VALUE_BYTES[kind]


def split(path, folder, count):
    """Writes a GGUF file of version 3 as `count` parts; returns the path of the first."""
    with open(path, "rb") as file:
        reader = Reader(file.read())
    reader.take("I")
    num_tensors, num_values = reader.take("Q"), reader.take("Q")
    begin = reader.at
    for _ in range(num_values):
        reader.text()
        reader.skip_value(reader.take("I"))
    metadata = reader.content[begin:reader.at]
    tensors = []
    for _ in range(num_tensors):
        name = reader.text()
        extents = [reader.take("Q") for _ in range(reader.take("I"))]
        tensors.append((name, extents, reader.take("I"), reader.take("Q")))
    data = reader.content[reader.at + len(padding(reader.at)):]
    ends = sorted(offset for _, _, _, offset in tensors)[1:] + [len(data)]
    tensors.sort(key=lambda tensor: tensor[3])
    for part in range(count):
        first, last = num_tensors * part // count, num_tensors * (part + 1) // count
        values = (text("split.no") + struct.pack("<IH", 2, part) +
                  text("split.count") + struct.pack("<IH", 2, count) +
                  text("split.tensors.count") + struct.pack("<Ii", 5, num_tensors))
        head = b"GGUF" + struct.pack("<IQQ", 3, last - first, 3 + (0 if part else num_values))
        head += (b"" if part else metadata) + values
        block = b""
        for (name, extents, kind, offset), end in zip(tensors[first:last], ends[first:last]):
            head += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind,
                                             len(block))
            block += data[offset:end]
            block += padding(len(block))
        with open(os.path.join(folder, f"small-{part + 1:05}-of-{count:05}.gguf"), "wb") as file:
            file.write(head + padding(len(head)) + block)
    return os.path.join(folder, f"small-00001-of-{count:05}.gguf")


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


    def test_in_parts_as_in_one_file(self):
        first = split(SMOLLM2, self.folder, 3)
        for path in (first, self.folder):
            self.assertIn("272 of 272 found in 3 files", self.succeeds("inspect", "-m", path).out)

        def answer(model):
            return self.succeeds("run", "-m", model, "-p", "Count to five.", "--temperature", "0",
                                 "--max-new-tokens", "12", "--quiet").out
        self.assertEqual(answer(first), answer(SMOLLM2))
        second = first.replace("00001-of", "00002-of")
        self.refused(3, ["part 2 of 3", "small-00001-of-00003.gguf"], "inspect", "-m", second)
        os.remove(second)
        self.refused(3, ["missing", "small-00002-of-00003.gguf"], "inspect", "-m", first)


class BrokenFiles(Case):
    def gguf(self, *values, version=3, tensors=0):
        head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(values))
        return self.write("model.gguf", head + b"".join(values))

    @staticmethod
    def text(key, value):
        return text(key) + struct.pack("<I", 8) + text(value)

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
