"""clo profile, and what the other commands make of its file."""
import json
import os
import re
import signal
import struct
import subprocess
import time
import xml.etree.ElementTree
import zlib

import program
from program import Case, document, edit_tensors, read_tensors

# Small and quick: two windows, 64 recorded steps each, in one run: they are too short for two.
SMALL = ["--context", "384,384", "--decode", "64", "--windows", "2", "--iterations", "40", "--quiet"]


class Profile(Case):
    def setUp(self):
        super().setUp()
        self.write("text.txt", document(lines=70))

    def profile(self, *args, output="heads.profile"):
        self.succeeds("profile", "-m", self.recall, "--text", "text.txt", *SMALL, "-o", output, *args)
        return self.path(output)

    def refuses(self, status, names, *args):
        return self.refused(status, names, "profile", "-m", self.recall, *args)

    def test_a_profile_is_made_shown_planned_and_used(self):
        answer = self.succeeds("profile", "-m", self.recall, "--text", "text.txt", "text.txt",
                               *SMALL, "--importance", "mass", "-o", "heads.profile", "--json",
                               "figures.jsonl", "--plan", "--budget", "1GiB")
        self.assertEqual(answer.err, "")
        self.assertIn("recorded on the CPU", answer.out)
        self.assertIn("hashes were trained on the CPU", answer.out)
        self.assertIn("nothing: every head is on the device", answer.out)
        header, _ = read_tensors(self.path("heads.profile"))
        facts = header["__metadata__"]
        self.assertEqual(facts["format"], "clo-profile-3")
        self.assertEqual((facts["windows"], facts["steps"]), ("2", "128"))
        self.assertEqual(facts["runs"], "1")
        self.assertEqual(facts["texts"], "text.txt, text.txt")
        self.assertEqual(header["importance"]["shape"], [8, 4])
        self.assertEqual(header["hash_weights"]["shape"], [8, 2, 65, 128])
        self.assertEqual(header["hash_weights"]["dtype"], "BF16")
        with open(self.path("figures.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([line["kind"] for line in lines], ["run", "summary"] + ["head"] * 16)
        for line in lines[2:]:
            self.assertGreaterEqual(line["recall_trained"], line["recall_random"])
            for figure in ("difficulty", "set_overlap", "new_rows_on_a_miss"):
                self.assertTrue(0 <= line[figure] <= 1, line)
            self.assertTrue(all(0 <= s <= 1 for s in line["importance"]), line)
        self.assertGreater(lines[1]["recall_trained"], lines[1]["recall_random"])
        self.assertNotIn("head_", "".join(self.files()))

        # inspect shows it, plans with it and plots it.
        shown = self.succeeds("inspect", "-m", self.recall, "--profile", "heads.profile",
                              "--context", "4096", "--budget", "8MiB", "--heads", "--plot", "map")
        self.assertRegex(shown.out, r"(?m)^7:1 ")
        self.assertRegex(shown.out, r"persistent heads +\d+ of 16: --persistent-heads \d:\d")
        self.assertRegex(shown.out, r"predicted hit rate +\d")
        self.assertIn("binds", shown.out)
        for figure in ("difficulty", "importance", "cosine", "overlap", "recall-random",
                       "recall-trained"):
            root = xml.etree.ElementTree.parse(self.path(f"map-{figure}.svg")).getroot()
            width, height = int(root.get("width")), int(root.get("height"))
            self.check_png(self.path(f"map-{figure}.png"), width, height)

        # And the engine takes it: the named heads, and the thresholds that it suggests.
        heads = re.search(r"--persistent-heads (\S+)", shown.out).group(1)
        threshold = re.search(r"threshold +(--eta \S+ --importance-exponent \S+)", shown.out).group(1)
        ran = self.succeeds("run", "-m", self.recall, "--context-file", "text.txt", "--question",
                            "What?", "--max-new-tokens", "4", "--profile", "heads.profile",
                            "--persistent-heads", heads, *threshold.split())
        self.assertTrue(ran.out)
        self.assertIn("trained on contexts of up to 384 tokens", ran.err)  # the text has more
        self.succeeds("bench", "decode", "-m", self.recall, "--context", "1024", "--profile",
                      "heads.profile", "--tokens", "4", "--repeats", "1")

    def test_windows_of_several_lengths(self):
        self.write("text.txt", document(lines=260))
        args = ["--text", "text.txt", "--decode", "64", "--iterations", "20", "--windows", "3"]
        for context, tokens in (("320,640", "640"), ("600", "600")):
            self.succeeds("profile", "-m", self.recall, *args, "--context", context, "--quiet",
                          "-o", "of.profile", "--json", "of.jsonl")
            with open(self.path("of.jsonl")) as lines:
                run = json.loads(lines.readline())
            self.assertEqual((run["context"], run["windows"]), (context, "3"))
            shown = self.succeeds("inspect", "-m", self.recall, "--profile", "of.profile")
            self.assertIn(f"trained on contexts of up to {tokens} tokens", shown.out)

    def test_queries_lie_in_runs(self):
        self.write("text.txt", document(lines=260))
        args = ["profile", "-m", self.recall, "--text", "text.txt", "--context", "640,800",
                "--windows", "3", "--iterations", "20", "--quiet"]
        for flags, runs, steps in (([], "5", "480"), (["--decode", "300"], "8", "888"),
                                   (["--decode", "96", "--runs", "2"], "2", "288"),
                                   (["--decode", "400"], "1", "1200")):
            self.succeeds(*args, *flags, "-o", "of.profile", "--json", "of.jsonl")
            with open(self.path("of.jsonl")) as lines:
                run = json.loads(lines.readline())
            self.assertEqual((run["runs"], run["steps"]), (runs, steps))
            shown = self.succeeds("inspect", "-m", self.recall, "--profile", "of.profile")
            self.assertRegex(shown.out, rf"(?m)^ *runs +{runs}$")
        self.refused(2, ["--runs", "1 to 3", "found 4", "at least 32 of the 96 tokens"], *args,
                     "--decode", "96", "--runs", "4", "-o", "x")
        self.refused(2, ["--runs", "1 to 1", "second half", "319"], *args, "--decode", "320",
                     "--runs", "2", "-o", "x")
        self.refused(2, ["--runs", "found 0"], *args, "--runs", "0", "-o", "x")

    def check_png(self, path, width, height):
        with open(path, "rb") as file:
            content = file.read()
        self.assertEqual(content[:8], b"\x89PNG\r\n\x1a\n")
        at, chunks = 8, {}
        while at < len(content):
            length, = struct.unpack(">I", content[at:at + 4])
            name, data = content[at + 4:at + 8], content[at + 8:at + 8 + length]
            crc, = struct.unpack(">I", content[at + 8 + length:at + 12 + length])
            self.assertEqual(crc, zlib.crc32(name + data))
            chunks[name] = data
            at += 12 + length
        self.assertEqual(list(chunks), [b"IHDR", b"IDAT", b"IEND"])
        self.assertEqual(chunks[b"IHDR"], struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        self.assertEqual(len(zlib.decompress(chunks[b"IDAT"])), height * (1 + 3 * width))

    def test_trained_hashes_change_no_answer_where_sets_cover_the_context(self):
        path = self.profile()
        ask = ["run", "-m", self.recall, "--context-file", "text.txt", "--question",
               "What is the special magic number for amber-falcon?", "--max-new-tokens", "16"]
        dense = self.succeeds(*ask, "--preset", "dense")
        covering = self.succeeds(*ask, "--kv-ratio", "1", "--persistent-heads", "0", "--profile", path)
        self.assertEqual(covering.out, dense.out)

    def test_the_profile_that_ships_is_of_the_model_that_ships(self):
        shipped = os.path.join(self.recall, "recall-7m.profile")
        shown = self.succeeds("inspect", "-m", self.recall, "--profile", shipped)
        self.assertIn("hash weights", shown.out)
        self.assertNotIn("importance-exponent", re.search(r"threshold .*", shown.out).group(0))
        for command in (["run", "-p", "hello", "--max-new-tokens", "2"],
                        ["eval", "recall", "--context", "1024", "--items", "1"],
                        ["bench", "decode", "--context", "1024", "--tokens", "2", "--repeats", "1"]):
            self.succeeds(*command, "-m", self.recall, "--profile", shipped)

    def test_without_training_or_importance(self):
        path = self.profile("--recipe", "none", "--bits", "64")
        header, _ = read_tensors(path)
        self.assertNotIn("hash_weights", header)
        self.assertNotIn("importance", header)
        self.assertNotIn("recall_trained", header)
        self.assertIn("difficulty", header)
        self.succeeds("inspect", "-m", self.recall, "--profile", path, "--plot", "map")

    def test_gates_replace_the_importance_of_a_heads_queries(self):
        self.write("gates.tsv", "".join(f"{layer / 8}\t1\n" for layer in range(8)))
        path = self.profile("--recipe", "none", "--gates", "gates.tsv")
        header, data = read_tensors(path)
        begin, end = header["importance"]["data_offsets"]
        self.assertEqual(list(struct.unpack("<32f", data[begin:end])),
                         [s for layer in range(8) for s in (layer / 8, layer / 8, 1, 1)])
        for content, names in (("1\t1\n", ["found 1 layers", "8 layers with 2 KV heads"]),
                               ("1\n" * 8, ["1 values for layer 0"]),
                               ("1 1.5\n" * 8, ["1.5", "layer 0, KV head 1"]),
                               ("[[1, 1], [1]]", ["found 2 layers"]),
                               ("a b\n", ["line 1"])):
            self.write("bad.tsv", content)
            self.refuses(3, ["bad.tsv", *names], "--text", "text.txt", "-o", "x", "--gates", "bad.tsv")

    def test_bad_inputs(self):
        self.write("empty.txt", "")
        self.write("short.txt", "A few words.")
        out = ["-o", "x.profile"]
        text = ["--text", "text.txt"]
        for status, names, args in (
                (2, ["--text", "required"], out),
                (2, ["--output", "required"], text),
                (3, ["expected at least 2048 tokens", "found 0"], ["--text", "empty.txt", *out]),
                (3, ["--context", "expected at least 384"],
                 ["--text", "short.txt", "--context", "384,384", *out]),
                (5, ["--backend cpu"], ["--text", "short.txt", "--backend", "cuda", *out]),
                (3, ["nowhere.txt", "cannot be read"], ["--text", "nowhere.txt", *out]),
                (3, ["no/folder", "cannot be written"], [*text, "-o", "no/folder"]),
                (3, ["no/folder", "cannot be written"], [*text, *out, "--json", "no/folder"]),
                (2, ["--bits", "64, 128 or 256", "192"], [*text, *out, "--bits", "192"]),
                (2, ["--recipe", "boundary"], [*text, *out, "--recipe", "best"]),
                (2, ["--importance", "mass"], [*text, *out, "--importance", "much"]),
                (2, ["--importance and --gates"],
                 [*text, *out, "--importance", "mass", "--gates", "short.txt"]),
                (2, ["--context", "256"], [*text, *out, "--context", "100"]),
                (2, ["--context", "shortest window", "found 200"],
                 [*text, *out, "--context", "400"]),
                (2, ["--context", "the shortest and the longest"],
                 [*text, *out, "--context", "2048,1024"]),
                (2, ["--context", "the shortest and the longest"],
                 [*text, *out, "--context", "512,1024,2048"]),
                (2, ["--decode", "32 to"], [*text, *out, "--decode", "4"]),
                (2, ["--windows"], [*text, *out, "--windows", "0"]),
                (2, ["--profile", "drop it"], [*text, *out, "--profile", "x"]),
                (2, ["chooses sets"], [*text, *out, "--preset", "dense"])):
            with self.subTest(args=args):
                self.refuses(status, names, *args)

    def test_a_profile_for_other_codes_models_or_budgets_is_refused(self):
        path = self.profile("--bits", "64")
        run = ["run", "-m", self.recall, "-p", "hello", "--profile", path]
        self.refused(3, [path, "128 bits", "64 bits", "use --bits 64"], *run)
        self.succeeds(*run, "--bits", "64", "--max-new-tokens", "2")
        inspect = ["inspect", "-m", self.recall]
        self.refused(2, ["--profile"], *inspect, "--heads")
        answer = self.clo(*inspect, "--profile", path, "--bits", "64", "--budget", "1KiB")
        self.assertEqual(answer.status, 4)
        self.assertIn("--budget", answer.err)
        edit_tensors(path, lambda h: h["__metadata__"].update(model="another"))
        self.refused(3, [path, "another", "LlamaForCausalLM"], *run, "--bits", "64")

    def test_ctrl_c_leaves_nothing(self):
        before = self.files()
        run = subprocess.Popen([program.CLO, "profile", "-m", self.recall, "--text", "text.txt",
                                "--context", "384,384", "--decode", "64", "--iterations", "1000000",
                                "-o", "x.profile"],
                               cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(2)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=program.SECONDS)
        self.assertEqual((run.returncode, out), (3, b""), err)
        self.assertIn(b"stopped", err)
        self.assertEqual(self.files(), before)
