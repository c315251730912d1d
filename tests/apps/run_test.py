"""clo run: answers, reports, streams, sampling and interruption."""
import os
import re
import signal
import subprocess
import time

import program
from program import FACTS, SECONDS, Case, Terminal, document, question

REPORT_KEYS = {
    "backend", "policy", "prompt_tokens", "reused_tokens", "new_tokens", "queue_seconds",
    "prefill_seconds", "first_token_seconds", "decode_seconds", "decode_steps",
    "decode_tokens_per_second", "kv_type", "row_bytes", "full_row_bytes", "device_kv_bytes",
    "host_kv_bytes", "bytes_fetched_per_token", "bytes_attended_per_token",
    "wait_seconds_per_token", "hit_rate", "share_attended", "num_heads", "num_resident_heads",
    "num_demoted_heads", "num_swapped_heads", "resident_by_profile", "hash_tokens", "total", "layers"
}
COUNTERS = {
    "hits", "misses", "aged", "incomplete", "corrections", "resident_selections",
    "rows_requested", "rows_fetched", "rows_saved_by_delta", "rows_saved_by_hits", "rows_primed",
    "rows_restored", "rows_offloaded", "rows_attended", "full_rows_attended", "rows_in_context",
    "oracle_rows", "wait_ns"
}
FIGURES = ["prompt", "finish reason", "backend", "policy", "tokens", "time to first token",
           "decode", "KV rows", "KV on the device", "KV in the host store", "bytes moved per token",
           "waiting for rows", "hit rate", "share attended"]


class Answers(Case):
    def setUp(self):
        super().setUp()
        self.write("text.txt", document())

    def run_(self, *args, **kwargs):
        return self.succeeds("run", "-m", self.recall, *args, **kwargs)

    def about_the_text(self, *args, keys=tuple(FACTS), **kwargs):
        questions = [word for key in keys for word in ("--question", question(key))]
        return self.run_("--context-file", "text.txt", *questions, "--stop", "\n", *args, **kwargs)

    def test_questions_share_one_prefill(self):
        answers = self.about_the_text("--json").json()
        self.assertEqual(len(answers), 2)
        for answer, (key, value) in zip(answers, FACTS.items()):
            self.assertEqual(answer["question"], question(key))
            self.assertIn(value, answer["text"])
            self.assertEqual(answer["finish_reason"], "stop")
        first, second = (answer["report"] for answer in answers)
        self.assertEqual(first["reused_tokens"], 0)
        # Whole pages of the document, all but the last part of a page.
        self.assertGreaterEqual(second["reused_tokens"], 1024)
        self.assertEqual(second["reused_tokens"] % 256, 0)

    def test_json_has_the_report(self):
        answer = self.about_the_text("--json", keys=["amber-falcon"]).json()[0]
        self.assertEqual(set(answer), {"text", "tokens", "finish_reason", "chat_template", "report",
                                       "question", "load_seconds"})
        self.assertGreater(answer["load_seconds"], 0)
        report = answer["report"]
        self.assertEqual(set(report), REPORT_KEYS)
        self.assertEqual(set(report["total"]), COUNTERS)
        self.assertEqual(len(report["layers"]), 8)
        for name in COUNTERS:
            self.assertEqual(report["total"][name], sum(x[name] for x in report["layers"]), name)
        total = report["total"]
        self.assertEqual(report["new_tokens"], len(answer["tokens"]))
        self.assertAlmostEqual(report["share_attended"],
                               total["rows_attended"] / total["rows_in_context"])
        decided = total["hits"] + total["misses"] + total["aged"] + total["incomplete"]
        kept = max(0, total["hits"] - total["corrections"])
        self.assertAlmostEqual(report["hit_rate"], kept / decided)
        self.assertEqual(decided, report["decode_steps"] * report["num_heads"])
        self.assertAlmostEqual(report["bytes_fetched_per_token"],
                               total["rows_fetched"] * report["row_bytes"] / report["decode_steps"])
        self.assertEqual(total["rows_requested"],
                         total["rows_fetched"] + total["rows_saved_by_delta"])
        self.assertLess(report["share_attended"], 0.5)

    def test_standard_output_is_the_answer_alone(self):
        answer = self.about_the_text(keys=["amber-falcon"])
        self.assertEqual(len(answer.out.splitlines()), 1, answer.out)
        self.assertIn(FACTS["amber-falcon"], answer.out)
        for figure in FIGURES:
            self.assertTrue(answer.figure(figure), figure)
        self.assertIn("chat template", answer.figure("prompt"))

    def test_quality_is_held_and_reported(self):
        args = ["--persistent-heads", "0", "--set-tokens", "128", "--quality", "0.8",
                "--max-new-tokens", "60", "--ignore-eos"]
        answer = self.about_the_text(*args, keys=["amber-falcon"])
        self.assertRegex(answer.figure("quality"), r"80\.0 % wanted, \d+\.\d % estimated")
        quality = self.about_the_text(*args, "--json", keys=["amber-falcon"]).json()[0]["report"][
            "quality"]
        self.assertEqual(quality["wanted"], 0.8)
        self.assertGreater(quality["samples"], 20)
        self.assertLess(quality["low"], quality["estimated"])
        self.assertLess(quality["estimated"], quality["high"])

    def test_quiet_prints_the_answer_alone(self):
        for keys in (["amber-falcon"], list(FACTS)):
            answer = self.about_the_text("--quiet", keys=keys)
            self.assertEqual(answer.err, "")
            self.assertEqual(len(answer.out.splitlines()), len(keys), answer.out)

    def test_questions_are_named_beside_their_answers(self):
        answer = self.about_the_text()
        for key in FACTS:
            self.assertIn(question(key), answer.err)
        self.assertEqual(len(answer.out.splitlines()), 2, answer.out)

    def test_stop_is_not_part_of_the_answer(self):
        full = self.about_the_text("--quiet", keys=["amber-falcon"]).out
        value = FACTS["amber-falcon"]
        for stop in (value, value[2:5]):
            cut = self.about_the_text("--quiet", "--stop", stop, keys=["amber-falcon"]).out
            self.assertEqual(cut.rstrip("\n"), full[:full.index(stop)])
        answer = self.about_the_text("--stop", value, "--json", keys=["amber-falcon"]).json()[0]
        self.assertEqual(answer["finish_reason"], "stop")

    def test_max_new_tokens(self):
        answer = self.run_("-p", "hello", "--max-new-tokens", "5", "--ignore-eos", "--json")
        answer = answer.json()[0]
        self.assertEqual(len(answer["tokens"]), 5)
        self.assertEqual(answer["finish_reason"], "length")
        self.assertEqual(answer["report"]["decode_steps"], 4)

    def test_answer_ends_where_the_context_does(self):
        answer = self.run_("-p", "hello", "--context", "40", "--ignore-eos", "--json",
                           "--max-new-tokens", "9223372036854775807").json()[0]
        self.assertEqual(answer["report"]["prompt_tokens"] + len(answer["tokens"]), 40)
        self.assertEqual(answer["finish_reason"], "length")

    def test_chunk_size_does_not_change_the_answer(self):
        texts = {self.about_the_text("--quiet", "--prefill-chunk", size).out
                 for size in ("64", "100", "4096")}
        self.assertEqual(len(texts), 1, texts)

    def test_presets_agree_on_what_their_sets_cover(self):
        self.write("text.txt", document(12))
        texts = {preset: self.about_the_text("--quiet", "--preset", preset).out
                 for preset in ("default", "clo-paper", "hata", "dense")}
        self.assertEqual(len(set(texts.values())), 1, texts)
        self.assertIn(FACTS["amber-falcon"], texts["dense"])

    def test_policies_find_the_facts(self):
        self.write("text.txt", document(40))
        for flags in (["--select", "exact"], ["--fetch", "whole"],
                      ["--predict", "previous-step", "--correction", "true_query"],
                      ["--persistent-heads", "0:0,7:1"], ["--persistent-heads", "1"],
                      ["--dense-layers", "2"], ["--set-tokens", "300"], ["--bits", "256"]):
            answers = self.about_the_text("--json", *flags).json()
            for answer, value in zip(answers, FACTS.values()):
                self.assertIn(value, answer["text"], flags)
            for flag in flags:
                if flag != "--bits" and flag != "256":
                    self.assertIn(flag, answers[0]["report"]["policy"])

    def test_dtype_f32(self):
        answer = self.about_the_text("--dtype", "f32", "--json").json()[0]
        self.assertIn(FACTS["amber-falcon"], answer["text"])
        self.assertEqual(answer["report"]["row_bytes"], 2 * 64 * 4)

    def test_kv_types(self):
        # head_dim 64: two halves of codes and, with int8, two scales, in whole 16 bytes.
        for kv_type, row, full in (("auto", 256, 256), ("f32", 512, 512), ("bf16", 256, 256),
                                   ("f16", 256, 256), ("int8", 144, 256), ("fp8", 128, 256)):
            answers = self.about_the_text("--kv-type", kv_type, "--json").json()
            for answer, value in zip(answers, FACTS.values()):
                report = answer["report"]
                self.assertEqual(report["kv_type"], "bf16" if kv_type == "auto" else kv_type)
                self.assertEqual([report["row_bytes"], report["full_row_bytes"]], [row, full])
                self.assertIn(value, answer["text"], kv_type)

    def test_int8_rows_answer_as_full_ones(self):
        def texts(*args):
            return [a["text"] for a in self.about_the_text("--json", *args).json()]
        self.assertEqual(texts("--kv-type", "int8"), texts("--kv-type", "bf16"))

    def test_weights_in_blocks(self):
        # Four bits are too few for a model as small as this one; eight are not.
        for answer, value in zip(self.about_the_text("--weights", "int8", "--json").json(),
                                 FACTS.values()):
            self.assertIn(value, answer["text"])

    def weight_bytes(self, weights):
        text = self.succeeds("inspect", "-m", self.recall, "--weights", weights).out
        number, unit = re.search(r"^  weights +device +([\d.]+) (\S+)", text, re.M).groups()
        return float(number) * {"KiB": 1, "MiB": 1024}[unit]

    def test_compressed_rows_take_less(self):
        def plan(kv_type):
            text = self.succeeds("inspect", "-m", self.recall, "--kv-type", kv_type,
                                 "--keep-prefixes").out
            bytes_of = {}
            for name in ("weights", "head caches", "host store"):
                number, unit = re.search(rf"^  {name} +\w+ +([\d.]+) (\S+)", text,
                                         re.M).groups()
                bytes_of[name] = float(number) * {"KiB": 1, "MiB": 1024, "GiB": 1024**2}[unit]
            return bytes_of, text
        full, text = plan("bf16")
        self.assertIn("per token of KV (bf16)", text)
        for kv_type, row in (("int8", 144), ("fp8", 128)):
            less, text = plan(kv_type)
            self.assertIn(f"per token of KV ({kv_type}, sink and recent rows in bf16)", text)
            self.assertEqual(less["weights"], full["weights"])
            # Rows, and 16 bytes of code beside each.
            self.assertAlmostEqual(less["host store"] / full["host store"], (row + 16) / 272, 2)
            self.assertLess(less["head caches"], full["head caches"])

    def test_the_plan_has_a_store_for_others_only_when_asked(self):
        for preset, alone in (("dense", False), ("default", True)):
            for args, wanted in (((), alone), (("--keep-prefixes",), True),
                                 (("--batch", "2"), True)):
                text = self.succeeds("inspect", "-m", self.recall, "--preset", preset, *args).out
                number = re.search(r"^  host store +host +([\d.]+) ", text, re.M).group(1)
                self.assertEqual(float(number) > 0, wanted, (preset, args))

    def test_weights_in_blocks_take_less(self):
        bf16 = self.weight_bytes("bf16")
        # 8.5 and 5 bits a weight instead of 16; the embedding has 8.5 in both.
        self.assertAlmostEqual(self.weight_bytes("int8") / bf16, 8.5 / 16, 2)
        self.assertLess(self.weight_bytes("q4") / bf16, 0.45)
        self.assertAlmostEqual(self.weight_bytes("f32") / bf16, 2, 1)

    def test_full_disk_is_not_an_answer(self):
        with open("/dev/full", "wb") as full:
            run = subprocess.run([program.CLO, "run", "-m", self.recall, "-p", "hello", "--quiet",
                                  "--max-new-tokens", "4"], stdout=full, stderr=subprocess.PIPE,
                                 timeout=SECONDS)
        self.assertEqual(run.returncode, 3)
        self.assertIn(b"standard output: cannot be written", run.stderr)


class Sampling(Case):
    def text(self, *args):
        return self.succeeds("run", "-m", self.recall, "-p", "Once upon a time", "--quiet",
                             "--ignore-eos", "--max-new-tokens", "40", *args).out

    def test_seed_repeats(self):
        one = self.text("--temperature", "1", "--seed", "7")
        self.assertEqual(one, self.text("--temperature", "1", "--seed", "7"))
        self.assertNotEqual(one, self.text("--temperature", "1", "--seed", "8"))

    def test_seed_alone_samples(self):
        self.assertEqual(self.text("--seed", "7"), self.text("--temperature", "1", "--seed", "7"))

    def test_largest_seed(self):
        self.text("--seed", "18446744073709551615")

    def test_temperature_zero_is_greedy(self):
        greedy = self.text()
        self.assertEqual(greedy, self.text("--temperature", "0", "--seed", "7"))
        self.assertEqual(greedy, self.text("--temperature", "1", "--top-k", "1", "--seed", "7"))
        self.assertNotEqual(greedy, self.text("--temperature", "1", "--seed", "7"))

    def test_repetition_penalty_changes_a_repetitive_answer(self):
        self.assertNotEqual(self.text(), self.text("--repetition-penalty", "1.3"))


class Streams(Case):
    def test_no_escape_codes_outside_a_terminal(self):
        for command in (["run", "-p", "hello", "--max-new-tokens", "2"], ["inspect"]):
            answer = self.succeeds(*command, "-m", self.recall)
            self.assertNotIn("\x1b", answer.out + answer.err)

    def test_no_color(self):
        texts = []
        for env in ({"NO_COLOR": ""}, {"NO_COLOR": "1"}):
            terminal = Terminal("inspect", "-m", self.recall, cwd=self.folder, env=env)
            self.addCleanup(terminal.close)
            self.assertEqual(terminal.end(), 0, terminal.text)
            texts.append(terminal.text)
        self.assertIn("\x1b[1m", texts[0])
        self.assertNotIn("\x1b", texts[1])

    def start(self, *args):
        process = subprocess.Popen([program.CLO, "run", "-m", self.recall, *args],
                                   cwd=self.folder, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_interrupt_during_decode(self):
        process = self.start("-p", "hello", "--ignore-eos", "--max-new-tokens", "30000")
        first = b""
        while len(first) < 60:  # well into decode
            first += os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=SECONDS)
        self.assertEqual(process.returncode, 130)
        self.assertRegex(err.decode(), r"finish reason +cancelled")
        self.assertRegex(err.decode(), r"tokens +\d+ prompt \(0 reused\), \d+ new")
        (first + rest).decode()

    def test_interrupt_as_json(self):
        process = self.start("-p", "hello", "--ignore-eos", "--max-new-tokens", "30000", "--json")
        # Nothing is printed before the end; the signal is caught once the threads that compute are
        # there.
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not self.catches_interrupts(process.pid):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn(b'"finish_reason":"cancelled"', out)

    def catches_interrupts(self, pid):
        with open(f"/proc/{pid}/status") as status:
            caught = re.search(r"SigCgt:\s*([0-9a-f]+)", status.read())
        return caught and int(caught.group(1), 16) & (1 << (signal.SIGINT - 1))

    def test_interrupt_during_prefill(self):
        self.write("text.txt", document(1200))
        terminal = Terminal("run", "-m", self.recall, "--file", "text.txt", "--prefill-chunk", "64",
                            cwd=self.folder)
        self.addCleanup(terminal.close)
        terminal.wait_for(r"reading the prompt: \d+ of \d+ tokens, .* left")
        terminal.type("\x03")
        self.assertEqual(terminal.end(), 130, terminal.text)
        self.assertRegex(terminal.text, r"finish reason +cancelled")
        self.assertRegex(terminal.text, r"tokens +\d+ prompt \(0 reused\), 0 new")

    def test_prompt_on_a_terminal_says_how_it_ends(self):
        terminal = Terminal("run", "-m", self.recall, "--max-new-tokens", "3", cwd=self.folder)
        self.addCleanup(terminal.close)
        terminal.wait_for(r"ctrl-D")
        terminal.type("hello\n\x04")
        self.assertEqual(terminal.end(), 0, terminal.text)

    def test_reader_that_goes_away(self):
        process = self.start("-p", "hello", "--ignore-eos", "--max-new-tokens", "30000")
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        self.assertEqual(process.wait(timeout=SECONDS), -signal.SIGPIPE)
