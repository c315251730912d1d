"""clo inspect, eval recall, bench decode, demo and help."""
import json
import os
import re
import statistics
import struct
import subprocess
import sys
from xml.etree import ElementTree

import program
from program import SECONDS, Case, document, edit_json, question, read_tensors, write_tensors

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


class Inspect(Case):
    def inspect(self, *args):
        return self.succeeds("inspect", "-m", self.recall, *args).out

    def fact(self, text, name):
        return re.search(rf"^  {name}  +(.*)$", text, re.M).group(1)

    def plan(self, text):
        """The rows of the plan as (name, place, bytes)."""
        rows = re.findall(r"^  (\S.*?)  +(device|host|process) +([\d.]+ \S+)", text, re.M)
        return [(name, place, size(amount)) for name, place, amount in rows]

    def test_names_what_the_model_is(self):
        text = self.inspect()
        self.assertIn("LlamaForCausalLM, 8 layers", self.fact(text, "architecture"))
        self.assertEqual(self.fact(text, "context"), "32768 tokens")
        self.assertIn("theta 500000", self.fact(text, "rope"))
        self.assertIn("74 of 74", self.fact(text, "tensors"))
        self.assertIn("4096 tokens", self.fact(text, "tokenizer"))
        self.assertEqual(self.fact(text, "chat template"), "yes")
        self.assertRegex(self.fact(text, "gpu"), r"^none: .*CUDA|compute capability")
        self.assertRegex(self.fact(text, "backend"), r"^(cpu|cuda)")

    def test_rope_scaling_is_shown(self):
        model = self.copy("recall")
        edit_json(model, "config.json", lambda c: c.update(
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}))
        text = self.succeeds("inspect", "-m", model).out
        self.assertRegex(self.fact(text, "rope").lower(), r"yarn.*4.*8192")

    def test_unused_tensors_are_named(self):
        model = self.copy("recall")
        path = os.path.join(model, "model.safetensors")
        with open(path, "rb") as file:
            content = file.read()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:8 + length])
        end = len(content) - 8 - length
        header["vision.tower"] = {"dtype": "I16", "shape": [3, 4], "data_offsets": [end, end + 24]}
        write_tensors(path, header, content[8 + length:] + bytes(24))
        self.assertIn("vision.tower", self.fact(self.succeeds("inspect", "-m", model).out,
                                                "not used"))

    def test_files_that_are_not_read_are_named(self):
        model = self.copy("recall")
        self.assertNotIn("files not read", self.inspect())
        for name in ("pytorch_model.bin", "consolidated.00.pth"):
            self.write(os.path.join(model, name), b"x")
        shown = self.fact(self.succeeds("inspect", "-m", model).out, "files not read")
        self.assertEqual(shown, '"consolidated.00.pth", "pytorch_model.bin"')

    def test_shards_without_an_index_are_one_model(self):
        model = self.copy("recall")
        path = os.path.join(model, "model.safetensors")
        header, data = read_tensors(path)
        os.remove(path)
        names = sorted(name for name in header if name != "__metadata__")
        for part, held in (("a", names[:9]), ("b", names[9:])):
            at, tensors, block = 0, {}, b""
            for name in held:
                begin, end = header[name]["data_offsets"]
                tensors[name] = dict(header[name], data_offsets=[at, at + end - begin])
                block += data[begin:end]
                at = len(block)
            write_tensors(os.path.join(model, f"{part}.safetensors"), tensors, block)
        shown = self.fact(self.succeeds("inspect", "-m", model).out, "tensors")
        self.assertIn("74 of 74 found in 2 files", shown)
        flags = ["-p", "hello", "--quiet", "--max-new-tokens", "12"]
        self.assertEqual(self.succeeds("run", "-m", model, *flags).out,
                         self.succeeds("run", "-m", self.recall, *flags).out)

    def test_token_ids_are_what_a_raw_prompt_becomes(self):
        text = self.write("text.txt", "The secret word\r\nfor blue-harbor is: \u00e9.\n")
        answer = self.succeeds("inspect", "-m", self.recall, "--token-ids", text)
        ids = [int(line) for line in answer.out.splitlines()]
        run = self.succeeds("run", "-m", self.recall, "--raw", "-f", text, "--json",
                            "--max-new-tokens", "1").json()[0]
        self.assertEqual(len(ids), run["report"]["prompt_tokens"])
        self.assertGreater(len(set(ids)), 5)
        self.refused(3, ["nowhere.txt"], "inspect", "-m", self.recall, "--token-ids",
                     "nowhere.txt")

    def test_plan_rows_sum_to_the_totals(self):
        for flags in ([], ["--batch", "8"], ["--preset", "dense"], ["--dense-layers", "2"],
                      ["--device-memory", "64MiB"], ["--kv-ratio", "0.5", "--context", "8192"]):
            rows = self.plan(self.inspect(*flags))
            for place in ("device", "host"):
                parts = [b for name, where, b in rows if where == place and name != "total"]
                total = [b for name, where, b in rows if where == place and name == "total"]
                self.assertEqual(len(total), 1)
                # Sizes are printed with three digits.
                self.assertAlmostEqual(sum(parts), total[0], delta=0.01 * sum(parts) + 1)

    def test_plan_grows_with_the_batch(self):
        def host(flags):
            rows = self.plan(self.inspect("--keep-prefixes", *flags))
            return [b for name, place, b in rows if (name, place) == ("total", "host")][0]

        self.assertAlmostEqual(host(["--batch", "4"]), 4 * host([]), delta=0.02 * host([]))

    def test_plan_beyond_the_system_is_printed_and_refused(self):
        model = self.copy("recall")
        edit_json(model, "config.json", lambda c: c.update(max_position_embeddings=(1 << 31) - 1))
        answer = self.clo("inspect", "-m", model, "--context", "2147483647", "--batch", "512")
        self.assertEqual(answer.status, 4, answer.err)
        self.assertIn("memory plan", answer.out)
        self.assertRegex(answer.out, r"total +host +[\d.]+ TiB")
        self.assertIn("--context", answer.err)
        self.assertEqual(len(answer.err.splitlines()), 1)

    def test_plan_beyond_a_budget_is_printed_and_refused(self):
        for flag, value in (("--device-memory", "15MiB"), ("--host-memory", "10MiB")):
            answer = self.clo("inspect", "-m", self.recall, flag, value)
            self.assertEqual(answer.status, 4, answer.err)
            self.assertIn("memory plan", answer.out)
            self.assertIn(flag, answer.err)

    def profile(self, model, format="clo-profile-1", shape=(8, 4), value=0.5):
        data = struct.pack(f"<{shape[0] * shape[1]}f", *[value] * (shape[0] * shape[1]))
        path = self.path("heads.safetensors")
        write_tensors(path, {"__metadata__": {"format": format, "model": model},
                             "importance": {"dtype": "F32", "shape": list(shape),
                                            "data_offsets": [0, len(data)]}}, data)
        return path

    def test_profile(self):
        own = self.fact(self.inspect(), "profile id")
        path = self.profile(own)
        self.assertIn("importance", self.fact(self.inspect("--profile", path), "profile"))
        answer = self.succeeds("run", "-m", self.recall, "-p", "hello", "--max-new-tokens", "2",
                               "--profile", path)
        self.assertTrue(answer.out)

    def test_bad_profiles(self):
        own = self.fact(self.inspect(), "profile id")
        for names, path in ((["another-model", own], lambda: self.profile("another-model")),
                            (["clo-profile-9"], lambda: self.profile(own, format="clo-profile-9")),
                            (["importance", "8, 3"], lambda: self.profile(own, shape=(8, 3))),
                            (["importance", "1.5"], lambda: self.profile(own, value=1.5)),
                            (["not finite"], lambda: self.profile(own, value=float("nan"))),
                            (["HTML"], lambda: self.write("heads.safetensors", "<html></html>")),
                            (["nowhere"], lambda: self.path("nowhere"))):
            file = path()
            for command in (["inspect"], ["run", "-p", "hello"]):
                self.refused(3, [os.path.basename(file), *names], *command, "-m", self.recall,
                             "--profile", file)


class Recall(Case):
    def test_items_and_summaries_add_up(self):
        answer = self.succeeds("eval", "recall", "-m", self.recall, "--context", "1024,1280",
                               "--items", "3", "--presets", "default,hata", "-o", "out.jsonl")
        self.assertEqual(answer.err, "")
        with open(self.path("out.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual(lines[0]["kind"], "run")
        self.assertIn("--presets default,hata", lines[0]["command"])
        items = [line for line in lines if line["kind"] == "item"]
        summaries = [line for line in lines if line["kind"] == "summary"]
        self.assertEqual([item["seed"] for item in items], [0, 1, 2, 0, 1, 2])
        self.assertEqual({(s["context"], s["policy"]) for s in summaries},
                         {(c, p) for c in (1024, 1280, 0) for p in ("default", "hata")})
        for item in items:
            self.assertLessEqual(item["prompt_tokens"], item["context"])
            self.assertGreater(item["prompt_tokens"], item["context"] - 300)
        for summary in summaries:
            mine = [i for i in items if summary["context"] in (0, i["context"])]
            for part, forms in (("numbers_and_words", ("number", "word")), ("codes", ("code",))):
                chosen = [i for i in mine if i["form"] in forms]
                right = [i["policies"][summary["policy"]]["right"] for i in chosen]
                dense = [i["dense"]["right"] for i in chosen]
                counts = summary[part]
                self.assertEqual(counts["items"], len(chosen))
                self.assertEqual(counts["right"], sum(right))
                self.assertEqual(counts["dense_right"], sum(dense))
                self.assertEqual(counts["lost"], sum(d and not r for d, r in zip(dense, right)))
                self.assertEqual(counts["gained"], sum(r and not d for d, r in zip(dense, right)))
                low, high = counts["interval_95"]
                self.assertLessEqual(low, counts["difference_points"])
                self.assertGreaterEqual(high, counts["difference_points"])
            policies = [i["policies"][summary["policy"]] for i in mine]
            self.assertAlmostEqual(summary["next_token_agreement"],
                                   sum(p["agreed"] for p in policies) /
                                   sum(p["compared"] for p in policies))
        self.assertEqual(len(re.findall(r"^ +1024 ", answer.out, re.M)), 2, answer.out)
        self.assertEqual(self.files(), [self.path("out.jsonl")])

    def test_same_items_again(self):
        texts = [self.succeeds("eval", "recall", "-m", self.recall, "--context", "1024", "--items",
                               "1").out for _ in range(2)]
        self.assertEqual(*texts)

    def test_output_that_cannot_be_written(self):
        os.mkdir(self.path("folder"))
        for path in ("nowhere/out.jsonl", "folder"):
            for command in (["eval", "recall", "--items", "1"], ["bench", "decode"]):
                self.refused(3, [path], *command, "-m", self.recall, "--context", "1024", "-o",
                             path)

    def test_output_through_a_link_and_to_a_device(self):
        os.symlink("real.jsonl", self.path("link.jsonl"))
        for path in ("link.jsonl", "/dev/null"):
            self.succeeds("eval", "recall", "-m", self.recall, "--context", "1024", "--items", "1",
                          "-o", path)
        self.assertTrue(os.path.islink(self.path("link.jsonl")))
        self.assertTrue(os.path.getsize(self.path("real.jsonl")))
        self.assertFalse(os.path.isfile("/dev/null"))

    def test_context_too_short(self):
        self.refused(3, ["context 300", "do not fit"], "eval", "recall", "-m", self.recall,
                     "--context", "300", "--items", "1")

    def test_licence_folder_missing(self):
        self.refused(3, ["nowhere"], "eval", "recall", "-m", self.recall, "--context", "1024",
                     "--items", "7", "--first-seed", "6", "--licences", "nowhere")


class Fidelity(Case):
    def table(self, *args, head=False):
        text = self.write("text.txt", document(200))
        output = self.path("out.jsonl")
        self.succeeds("eval", "fidelity", "-m", self.recall, "--text", text, "--quiet", "-o",
                      output, *args)
        with open(output) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([line["kind"] for line in lines], ["run"] + ["summary"] * (len(lines) - 1))
        return lines if head else lines[1:]

    def test_nothing_changes_when_everything_is_attended(self):
        reference, whole, part, least = self.table(
            "--context", "1024", "--compared", "200", "--ratios", "1,0.4,0.25",
            "--persistent-heads", "0")
        self.assertEqual([reference["perplexity_ratio"], reference["kl_nats"],
                          reference["next_token_agreement"]], [1, 0, 1])
        self.assertEqual(reference["tokens"], 200)
        self.assertLess(whole["kl_nats_max"], 1e-3)
        self.assertAlmostEqual(whole["mass_kept"], 1, 3)
        self.assertGreater(whole["bytes_fetched_per_token"], 0)
        # What is left out costs, and more costs more.
        self.assertGreater(part["kl_nats"], whole["kl_nats"])
        self.assertGreater(least["kl_nats"], part["kl_nats"])
        self.assertLess(least["mass_kept"], part["mass_kept"])

    def test_weights_beside_each_other(self):
        rows = self.table("--context", "512", "--compared", "128", "--windows", "2", "--presets",
                          "dense", "--weights-list", "bf16,int8,q4")
        self.assertEqual([row["weights"] for row in rows], ["bf16", "int8", "q4"])
        self.assertEqual({row["tokens"] for row in rows}, {256})
        self.assertEqual(rows[0]["kl_nats"], 0)
        self.assertLess(0, rows[1]["kl_nats"])
        self.assertLess(rows[1]["kl_nats"], rows[2]["kl_nats"])

    def test_all_windows_read_the_whole_text(self):
        def run(*args):
            return self.table("--presets", "dense", "--all-windows", *args, head=True)

        head, row = run("--context", "1024", "--compared", "1023")
        windows, rest = divmod(head["text_tokens"], 1024)
        self.assertGreater(windows, 1)
        self.assertGreater(rest, 1)
        self.assertEqual(head["windows"], windows + 1)
        self.assertEqual(row["tokens"], head["text_tokens"] - head["windows"])
        # One window of the whole text is its shorter last one.
        head, row = run("--context", "32768", "--compared", "32767")
        self.assertEqual([head["windows"], row["tokens"]], [1, head["text_tokens"] - 1])
        self.assertEqual(run("--context", "32768", "--compared", "10")[1]["tokens"], 10)

    def test_row_types_beside_each_other(self):
        rows = self.table("--context", "768", "--compared", "128", "--presets", "dense",
                          "--kv-type-list", "auto,f32,int8,fp8")
        self.assertEqual([row["kv_type"] for row in rows], ["bf16", "f32", "int8", "fp8"])
        self.assertEqual([row["row_bytes"] for row in rows], [256, 512, 144, 128])
        self.assertEqual([row["full_row_bytes"] for row in rows], [256, 512, 256, 256])
        self.assertEqual(rows[0]["kl_nats"], 0)
        # Seven bits and a scale keep more than three and none.
        self.assertLess(0, rows[2]["kl_nats"])
        self.assertLess(rows[2]["kl_nats"], rows[3]["kl_nats"])
        self.assertLess(rows[3]["bytes_attended_per_token"], rows[2]["bytes_attended_per_token"])
        self.assertLess(rows[2]["bytes_attended_per_token"], rows[0]["bytes_attended_per_token"])
        for row in rows:
            layers = row["query_cosine_by_layer"]
            self.assertEqual(len(layers), 8)
            self.assertAlmostEqual(sum(layers) / 8, row["query_cosine"], 6)
            self.assertTrue(all(-1 < cosine < 1 for cosine in layers))
        # The reference's own queries, with or without compressed rows beside them.
        self.assertAlmostEqual(rows[0]["query_cosine"], rows[2]["query_cosine"], 1)

    def test_plot(self):
        self.table("--context", "768", "--compared", "32", "--ratios", "0.5,0.4",
                   "--kv-type-list", "auto,int8")
        script = os.path.join(program.SOURCE, "bench", "plot_fidelity")
        for axis in ("bytes", "ratio"):
            drawn = subprocess.run([sys.executable, script, self.path("out.jsonl"),
                                    self.path("out.svg"), "--x", axis], capture_output=True,
                                   text=True, timeout=SECONDS)
            self.assertEqual(drawn.stderr, "")
            root = ElementTree.parse(self.path("out.svg")).getroot()
            svg = "{http://www.w3.org/2000/svg}"
            # Dense and the two types of the policy, in both panels; a point for each line.
            self.assertEqual(len(root.findall(f"{svg}polyline")), 2 * 3)
            self.assertEqual(len(root.findall(f"{svg}circle")), 2 * 5)
        # Over fetched bytes a line for what differs in thresholds alone, and the front.
        self.table("--context", "1400", "--compared", "24", "--persistent-heads", "0",
                   "--threshold", "0.5", "--hit-tests", "cosine,cosine+drift", "--qualities",
                   "none,0.7")
        drawn = subprocess.run([sys.executable, script, self.path("out.jsonl"),
                                self.path("out.svg"), "--x", "fetched"], capture_output=True,
                               text=True, timeout=SECONDS)
        self.assertEqual(drawn.stderr, "")
        root = ElementTree.parse(self.path("out.svg")).getroot()
        self.assertEqual(len(root.findall(f"{svg}polyline")), 2 * (4 + 1))
        self.assertEqual(len(root.findall(f"{svg}circle")), 2 * 4)
        self.write("old.jsonl", json.dumps({"kind": "summary", "suite": "fidelity"}))
        for args, named in ((["nowhere.jsonl"], "nowhere.jsonl"), (["old.jsonl"], "kv_type")):
            failed = subprocess.run([sys.executable, script, *map(self.path, args),
                                     self.path("out.svg")], capture_output=True, text=True,
                                    timeout=SECONDS)
            self.assertNotEqual(failed.returncode, 0)
            self.assertIn(named, failed.stderr)

    def test_bad_input(self):
        text = self.write("short.txt", "a few words")
        command = ["eval", "fidelity", "-m", self.recall]
        self.refused(2, ["--kv-type-list", "--kv-type"], *command, "--text", text,
                     "--kv-type", "int8", "--kv-type-list", "auto,int8")
        self.refused(2, ["--kv-type", "int3"], *command, "--text", text, "--kv-type-list", "int3")
        self.refused(3, ["--text", "need 4096", "tokens"], *command, "--text", text)
        self.refused(3, ["nowhere.txt"], *command, "--text", "nowhere.txt")
        self.refused(2, ["--compared"], *command, "--text", text, "--context", "64",
                     "--compared", "64")
        self.refused(2, ["--weights-list", "--weights"], *command, "--text", text,
                     "--weights", "q4", "--weights-list", "q4,int8")
        self.refused(2, ["--windows and --all-windows"], *command, "--text", text, "--windows",
                     "2", "--all-windows")
        self.refused(2, ["--windows", "found 0"], *command, "--text", text, "--windows", "0")
        one = self.write("one.txt", "a")
        self.refused(3, ["--text", "1 token", "at least 2"], *command, "--text", one,
                     "--all-windows")
        self.refused(2, ["--weights", "int3"], *command, "--text", text, "--weights-list", "int3")
        self.refused(2, ["--context", "32768"], *command, "--text", text, "--context", "40000")


class Bench(Case):
    def test_points_are_consistent(self):
        answer = self.succeeds("bench", "decode", "-m", self.recall, "--context", "1024",
                               "--tokens", "4", "--repeats", "2", "--batch", "1,2", "-o",
                               "out.jsonl")
        with open(self.path("out.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        head, points = lines[0], lines[1:]
        self.assertEqual(head["kind"], "run")
        self.assertEqual([(p["batch"], p["preset"]) for p in points],
                         [(b, p) for b in (1, 2) for p in ("dense", "default")])
        dense = {p["batch"]: p for p in points if p["preset"] == "dense"}
        for point in points:
            self.assertEqual(len(point["tokens_per_second"]), 2)
            rate = point["median_tokens_per_second"]
            self.assertAlmostEqual(rate, statistics.median(point["tokens_per_second"]))
            self.assertAlmostEqual(point["ratio_to_dense"],
                                   rate / dense[point["batch"]]["median_tokens_per_second"])
            self.assertAlmostEqual(point["share_of_floor"], rate * point["bytes_per_token"] /
                                   head["read_bandwidth_bytes_per_s"])
            self.assertEqual(point["report"]["new_tokens"], 4)
            self.assertLessEqual(point["report"]["prompt_tokens"] + 4, 1024)
        self.assertEqual(dense[1]["report"]["share_attended"], 1)
        self.assertLess(points[1]["report"]["share_attended"], 1)
        self.assertEqual(len(re.findall(r"^ +1024 ", answer.out, re.M)), 4)

    def test_training_of_a_shape(self):
        args = ["bench", "train", "--layers", "1", "--context", "768", "--decode", "64", "--windows",
                "3", "--iterations", "60", "--bits", "64,128", "--backend", "cpu"]
        answer = self.succeeds(*args, "-o", "out.jsonl")
        self.assertIn("training on the CPU", answer.out)
        with open(self.path("out.jsonl")) as file:
            head, *points = [json.loads(line) for line in file]
        self.assertEqual((head["heads"], head["iterations"], head["device"]), (8, 60, "the CPU"))
        self.assertEqual([point["bits"] for point in points], [64, 128])
        for point in points:
            self.assertGreater(point["recall_trained"], point["recall_random"] + 0.02)
            self.assertEqual(len(point["first_heads"]), 4)
        self.refused(2, ["--bits", "64, 128 or 256"], *args[:-4], "--bits", "96")
        self.refused(2, ["--cpu-layers", "0 to 1"], *args, "--cpu-layers", "2")
        self.refused(5, ["--backend cpu"], *args[:-1], "cuda")

    def test_sets_that_cover_everything_fit(self):
        model = self.copy("recall")
        edit_json(model, "config.json", lambda c: c.update(max_position_embeddings=1024))
        self.succeeds("bench", "decode", "-m", model, "--context", "1024", "--kv-ratio", "1",
                      "--tokens", "2", "--repeats", "1", "--quiet")


class Demo(Case):
    def demo(self, *args):
        return self.succeeds("demo", "-m", self.recall, *args).out

    def planted(self, text):
        return re.findall(r"planted at +\d+ % +(\S+)", text)

    def without_times(self, text):
        return [line for line in text.splitlines()
                if not re.match(r"Time:|  (time to|decode) ", line)]

    def test_without_a_file(self):
        text = self.demo("--tokens", "600", "--seed", "3")
        self.assertIn("three facts planted", text)
        self.assertEqual(len(self.planted(text)), 3)
        self.assertEqual(len(re.findall(r"^  dense  +.*(right|wrong)$", text, re.M)), 3)
        self.assertEqual(len(re.findall(r"^  10 % of the KV +.*(right|wrong)$", text, re.M)), 3)
        count = int(re.search(r"(\d+) tokens", text).group(1))
        self.assertLessEqual(count, 600)
        self.assertGreater(count, 500)

    def test_seed_repeats(self):
        one, two, other = (self.demo("--tokens", "600", "--seed", seed) for seed in ("3", "3", "4"))
        self.assertEqual(self.without_times(one), self.without_times(two))
        self.assertNotEqual(self.planted(one), self.planted(other))

    def test_seed_is_random_and_named(self):
        seeds = {re.search(r"--seed (\d+) repeats", self.demo("--tokens", "600")).group(1)
                 for _ in range(2)}
        self.assertEqual(len(seeds), 2)

    def test_short_file(self):
        self.write("text.txt", "Just a few words.\n")
        text = self.demo("text.txt")
        self.assertEqual(len(self.planted(text)), 3)
        self.assertIn("The text is short", text)

    def test_short_file_and_question(self):
        self.write("text.txt", "Just a few words.")
        text = self.demo("text.txt", "--question", "Why?")
        self.assertIn("Why?", text)
        self.assertNotIn("planted", text)

    def test_question_without_a_file(self):
        text = self.demo("--tokens", "600", "--seed", "1", "--question", "Who may copy this?")
        self.assertGreater(int(re.search(r"(\d+) tokens", text).group(1)), 500)

    def test_own_questions_find_facts(self):
        self.write("text.txt", document(40))
        text = self.demo("text.txt", "--question", question("amber-falcon"), "--question",
                         question("silver-otter"))
        self.assertEqual(len(re.findall("4821377", text)), 2, text)
        self.assertRegex(text, r"document read +[\d.]+ s +[\d.]+ s")
        # The one answer that read the document does not say what a question costs after that.
        one = self.demo("text.txt", "--question", question("amber-falcon"))
        self.assertRegex(one, r"document read +- +[\d.]+ s")
        self.assertEqual(len(re.findall("7710429", text)), 2, text)

    def test_crlf_and_byte_order_mark(self):
        plain = document(20)
        self.write("text.txt", plain)
        first = self.demo("text.txt", "--seed", "5")
        self.write("text.txt", b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode())
        self.assertEqual(self.without_times(first),
                         self.without_times(self.demo("text.txt", "--seed", "5")))

    def test_empty_file(self):
        for content in ("", " \n\t\n"):
            self.write("text.txt", content)
            self.refused(3, ["text.txt", "empty"], "demo", "-m", self.recall, "text.txt")

    def test_binary_file(self):
        self.write("text.bin", bytes(range(256)))
        self.refused(3, ["text.bin", "NUL"], "demo", "-m", self.recall, "text.bin")

    def test_unknown_file(self):
        self.refused(3, ["nowhere.txt", "No such file"], "demo", "-m", self.recall, "nowhere.txt")

    def test_long_files_are_cut(self):
        model = self.copy("recall")
        edit_json(model, "config.json", lambda c: c.update(max_position_embeddings=1024))
        long_lines = document(200)
        for content, flags in ((long_lines, []), (long_lines.replace("\n", " "), []),
                               (long_lines, ["--question", "Why?"]),
                               ("\u00e9" * 100000, ["--question", "Why?"])):
            self.write("text.txt", content)
            text = self.succeeds("demo", "-m", model, "text.txt", *flags).out
            count = int(re.search(r"(\d+) tokens", text).group(1))
            self.assertIn("cut to what the model can hold", text)
            self.assertLess(count, 1024)
            self.assertGreater(count, 600)

    def test_questions_that_leave_no_room(self):
        model = self.copy("recall")
        edit_json(model, "config.json", lambda c: c.update(max_position_embeddings=256))
        self.write("text.txt", document(5))
        self.refused(3, ["--question"], "demo", "-m", model, "text.txt", "--question", "why " * 400)


class Help(Case):
    POLICY = ["--kv-ratio", "--set-tokens", "--select", "--threshold", "--eta",
              "--importance-exponent", "--aggregate", "--persistent-heads", "--predict",
              "--correction", "--fetch", "--max-label-age", "--sink", "--recent", "--dense-layers",
              "--preset"]

    def test_program(self):
        text = self.succeeds("--help").out
        for command in ("demo", "run", "inspect", "eval", "bench", "Exit status"):
            self.assertIn(command, text)

    def test_commands_name_every_policy_flag(self):
        for command in (["run"], ["inspect"], ["demo"], ["eval", "recall"], ["eval", "ruler"],
                        ["bench", "decode"]):
            answer = self.succeeds(*command, "--help")
            self.assertEqual(answer.err, "")
            for flag in self.POLICY + ["--model", "--device-memory", "--threads"]:
                self.assertIn(flag, answer.out, command)
            for line in answer.out.splitlines():
                if not line.startswith("  "):
                    self.assertLessEqual(len(line), 120, line)

    def test_suites(self):
        text = self.succeeds("eval", "--help").out
        for suite in ("recall", "fidelity", "ruler", "niah", "infinite", "multihop", "position",
                      "length", "longbench"):
            self.assertIn(suite, text)
        self.assertIn("decode", self.succeeds("bench", "--help").out)

    def test_presets_are_explained(self):
        for command in ("run", "inspect"):
            text = self.succeeds(command, "--help").out
            for name in ("default", "clo-paper", "hata", "dense"):
                self.assertRegex(text, rf"(?m)^  {name}: ")

    def test_version(self):
        self.assertRegex(self.succeeds("--version").out, r"^clo \d+\.\d+\.\d+\n$")
