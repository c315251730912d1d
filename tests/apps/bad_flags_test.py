"""Command lines that cannot be followed: exit status 2 for flags, 4 for memory, 5 for a device."""
import re

from program import Case, document

BOTH = "contradict each other"


class Flags(Case):
    """Each test is a line of CASES: arguments after `run -m MODEL`, and what the message names."""

    def refuse(self, status, names, *args):
        self.refused(status, names, "run", "-m", self.recall, *args)


CASES = {
    "unknown": (["-p", "x", "--frobnicate"], ["--frobnicate", "clo run --help"]),
    "unknown_short": (["-p", "x", "-z"], ["-z"]),
    "argument_too_many": (["-p", "x", "more"], ["more"]),
    "value_missing": (["-p"], ["--prompt", "needs a value"]),
    "given_twice": (["-p", "x", "-p", "y"], ["--prompt", "more than once"]),
    "preset_unknown": (["-p", "x", "--preset", "fast"], ["--preset", "fast", "clo-paper", "hata"]),
    "select_unknown": (["-p", "x", "--select", "best"], ["--select", "best", "exact"]),
    "backend_unknown": (["-p", "x", "--backend", "tpu"], ["--backend", "tpu"]),
    "dtype_unknown": (["-p", "x", "--dtype", "int4"], ["--dtype", "int4", "bf16"]),
    "kv_type_unknown": (["-p", "x", "--kv-type", "int4"], ["--kv-type", "int4", "fp8"]),
    "weights_unknown": (["-p", "x", "--weights", "int3"], ["--weights", "int3", "q4"]),
    "size_text": (["-p", "x", "--device-memory", "lots"], ["--device-memory", "lots", "24GiB"]),
    "size_unit": (["-p", "x", "--host-memory", "5 apples"], ["--host-memory", "5 apples"]),
    "size_negative": (["-p", "x", "--device-memory", "-1GiB"], ["--device-memory", "-1GiB"]),
    "size_zero": (["-p", "x", "--device-memory", "0"], ["--device-memory", "above 0"]),
    "size_exponent": (["-p", "x", "--device-memory", "1e300GiB"], ["--device-memory", "1e300GiB"]),
    "threshold_and_eta": (["-p", "x", "--threshold", "0.9", "--eta", "0.8"],
                          ["--threshold", "--eta", BOTH]),
    "prompt_and_file": (["-p", "x", "--file", "y"], ["--prompt", "--file", BOTH]),
    "prompt_and_context_file": (["-p", "x", "--context-file", "y", "--question", "z"],
                                ["--prompt", "--context-file", BOTH]),
    "question_alone": (["--question", "x"], ["--question", "--context-file"]),
    "question_empty": (["--context-file", "x", "--question", ""], ["--question", "empty"]),
    "context_file_alone": (["--context-file", "x"], ["--context-file", "--question"]),
    "chat_and_json": (["--chat", "--json"], ["--chat", "--json", BOTH]),
    "chat_and_raw": (["--chat", "--raw"], ["--chat", "--raw", BOTH]),
    "chat_and_prompt": (["--chat", "-p", "x"], ["--chat", "--prompt", BOTH]),
    "chat_and_file": (["--chat", "--file", "x"], ["--chat", "--file", BOTH]),
    "raw_and_system": (["-p", "x", "--raw", "--system", "y"], ["--raw", "--system", BOTH]),
    "correction_without_prediction": (
        ["-p", "x", "--predict", "none", "--correction", "true_query"],
        ["--predict none", "--correction true_query", BOTH]),
    "dense_and_ratio": (["-p", "x", "--preset", "dense", "--kv-ratio", "0.1"],
                        ["--preset dense", "--kv-ratio", BOTH]),
    "dense_and_label_age": (["-p", "x", "--preset", "dense", "--max-label-age", "9"],
                            ["--preset dense", "--max-label-age", BOTH]),
    "select_none_and_sink": (["-p", "x", "--select", "none", "--sink", "9"],
                             ["--select none", "--sink", BOTH]),
    "graded_hash_without_codes": (["-p", "x", "--bits", "0"],
                                  ["--select graded-hash", "--bits 0", BOTH]),
    "hash_without_codes": (["-p", "x", "--select", "hash", "--bits", "0"],
                           ["--select hash", "--bits 0", BOTH]),
    "bits_odd": (["-p", "x", "--bits", "100"], ["--bits", "64", "100"]),
    "bits_negative": (["-p", "x", "--bits", "-64"], ["--bits", "-64"]),
    "set_tokens_zero": (["-p", "x", "--set-tokens", "0"], ["--set-tokens", "at least 1"]),
    "set_tokens_negative": (["-p", "x", "--set-tokens", "-5"], ["--set-tokens", "-5"]),
    "ratio_above_one": (["-p", "x", "--kv-ratio", "2"], ["--kv-ratio", "2"]),
    "ratio_zero": (["-p", "x", "--kv-ratio", "0"], ["--kv-ratio", "0"]),
    "ratio_negative": (["-p", "x", "--kv-ratio", "-0.1"], ["--kv-ratio", "-0.1"]),
    "ratio_nan": (["-p", "x", "--kv-ratio", "nan"], ["--kv-ratio", "nan"]),
    "ratio_text": (["-p", "x", "--kv-ratio", "0.1x"], ["--kv-ratio", "0.1x"]),
    "threshold_nan": (["-p", "x", "--threshold", "nan"], ["--threshold", "nan"]),
    "quality_one": (["-p", "x", "--quality", "1"], ["--quality", "below 1", "found 1"]),
    "quality_percent": (["-p", "x", "--quality", "99"], ["--quality", "0.99", "found 99"]),
    "quality_nan": (["-p", "x", "--quality", "nan"], ["--quality", "nan"]),
    "quality_and_dense": (["-p", "x", "--preset", "dense", "--quality", "0.9"],
                          ["--preset dense", "--quality", BOTH]),
    "hit_test_unknown": (["-p", "x", "--hit-test", "drift"], ["--hit-test", "cosine+drift"]),
    "drift_limit_alone": (["-p", "x", "--drift-limit", "2"],
                          ["--drift-limit", "--hit-test cosine+drift"]),
    "entropy_rise_beside_drift": (["-p", "x", "--hit-test", "cosine+drift", "--entropy-rise", "2"],
                                  ["--entropy-rise", "--hit-test cosine+entropy"]),
    "drift_limit_zero": (["-p", "x", "--hit-test", "cosine+drift", "--drift-limit", "0"],
                         ["--drift-limit", "found 0"]),
    "persistent_head_absent": (["-p", "x", "--persistent-heads", "99:0"],
                               ["--persistent-heads", "99:0", "0 to 7"]),
    "persistent_head_negative": (["-p", "x", "--persistent-heads", "0:-1"],
                                 ["--persistent-heads", "0:-1"]),
    "persistent_heads_too_many": (["-p", "x", "--persistent-heads", "3"],
                                  ["--persistent-heads", "at most 2", "3"]),
    "persistent_heads_text": (["-p", "x", "--persistent-heads", "most"],
                              ["--persistent-heads", "most"]),
    "dense_layers_beyond": (["-p", "x", "--dense-layers", "9"], ["--dense-layers", "8", "9"]),
    "dense_layers_negative": (["-p", "x", "--dense-layers", "-2"], ["--dense-layers", "-2"]),
    "label_age_negative": (["-p", "x", "--max-label-age", "-1"], ["--max-label-age", "-1"]),
    "sink_negative": (["-p", "x", "--sink", "-1"], ["--sink", "-1"]),
    "recent_zero": (["-p", "x", "--recent", "0"], ["--recent", "found 0"]),
    "threads_negative": (["-p", "x", "--threads", "-1"], ["--threads", "-1"]),
    "threads_beyond_int": (["-p", "x", "--threads", "4294967297"], ["--threads", "4294967297"]),
    "chunk_small": (["-p", "x", "--prefill-chunk", "1"], ["--prefill-chunk", "16"]),
    "chunk_zero": (["-p", "x", "--prefill-chunk", "0"], ["--prefill-chunk", 'found "0"']),
    "chunk_fraction": (["-p", "x", "--prefill-chunk", "51.2"], ["--prefill-chunk", "51.2"]),
    "context_zero": (["-p", "x", "--context", "0"], ["--context", "at least 1"]),
    "context_negative": (["-p", "x", "--context", "-5"], ["--context", "-5"]),
    "context_beyond_the_model": (["-p", "x", "--context", "32769"],
                                 ["--context", "32768", "32769"]),
    "new_tokens_zero": (["-p", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "found 0"]),
    "new_tokens_negative": (["-p", "x", "--max-new-tokens", "-3"], ["--max-new-tokens", "-3"]),
    "new_tokens_beyond_int": (["-p", "x", "--max-new-tokens", "99999999999999999999"],
                              ["--max-new-tokens", "99999999999999999999"]),
    "seed_negative": (["-p", "x", "--seed", "-1"], ["--seed", "-1"]),
    "temperature_negative": (["-p", "x", "--temperature", "-1"], ["--temperature", "-1"]),
    "temperature_nan": (["-p", "x", "--temperature", "nan"], ["--temperature", "nan"]),
    "top_p_above_one": (["-p", "x", "--top-p", "1.5"], ["--top-p", "1.5"]),
    "top_k_negative": (["-p", "x", "--top-k", "-1"], ["--top-k", "-1"]),
    "min_p_above_one": (["-p", "x", "--min-p", "2"], ["--min-p", "2"]),
    "penalty_zero": (["-p", "x", "--repetition-penalty", "0"], ["--repetition-penalty", "0"]),
    "stop_empty": (["-p", "x", "--stop", ""], ["--stop", "empty"]),
    "prompt_not_utf8": (["-p", b"caf\xe9"], ["--prompt", "UTF-8", "3"]),
    "question_not_utf8": (["--context-file", "x", "--question", b"\xff?"],
                          ["--question", "UTF-8", "0"]),
}

for _name, (_args, _names) in CASES.items():
    setattr(Flags, f"test_{_name}",
            lambda self, args=_args, names=_names: self.refuse(2, names, *args))


class Commands(Case):
    def test_none(self):
        self.refused(2, ["command", "clo --help"])

    def test_unknown(self):
        self.refused(2, ["rnu", "clo --help"], "rnu", "-m", self.recall)

    def test_unknown_suite(self):
        self.refused(2, ["recal", "clo eval --help"], "eval", "recal", "-m", self.recall)

    def test_suite_missing(self):
        self.refused(2, ["command", "clo bench --help"], "bench")

    def test_model_missing(self):
        self.refused(2, ["--model", "required"], "run", "-p", "x")

    def test_cuda_is_absent_by_name(self):
        if "none:" not in self.clo("inspect", "-m", self.recall).out:
            self.skipTest("this machine has a GPU")
        for command in (["run", "-p", "x"], ["inspect"], ["demo"], ["eval", "recall"],
                        ["bench", "decode"]):
            self.refused(5, ["CUDA", "--backend"], *command, "-m", self.recall, "--backend", "cuda")

    def test_inspect_checks_what_run_checks(self):
        for flag, value in (("--threads", "-1"), ("--prefill-chunk", "1"), ("--bits", "0"),
                            ("--persistent-heads", "99:0"), ("--dense-layers", "99"),
                            ("--context", "40000"), ("--batch", "0"), ("--batch", "513")):
            self.refused(2, [flag], "inspect", "-m", self.recall, flag, value)

    def test_eval_lists_and_flags_contradict(self):
        for one, other in ((["--presets", "hata"], ["--preset", "default"]),
                           (["--selects", "hash"], ["--select", "exact"]),
                           (["--ratios", "0.1"], ["--kv-ratio", "0.2"]),
                           (["--ratios", "0.1"], ["--set-tokens", "300"])):
            self.refused(2, [one[0], other[0], BOTH], "eval", "recall", "-m", self.recall, *one,
                         *other)

    def test_eval_values(self):
        for flag, value in (("--context", "x"), ("--context", "4096,"), ("--context", "-1"),
                            ("--context", "32769"), ("--items", "0"), ("--first-seed", "-6"),
                            ("--first-seed", "5"), ("--facts-per-document", "0"),
                            ("--ratios", "0.1,many"), ("--presets", "hata,hata"),
                            ("--presets", "fast"), ("--against", "hata")):
            self.refused(2, [flag.replace("presets", "preset")], "eval", "recall", "-m",
                         self.recall, flag, value)

    def test_bench_values(self):
        for flag, value in (("--context", "x"), ("--context", "100"), ("--context", "32769"),
                            ("--batch", "0"), ("--batch", "513"), ("--tokens", "1"),
                            ("--repeats", "0"), ("--preset", "dense,fast")):
            self.refused(2, [flag], "bench", "decode", "-m", self.recall, flag, value)

    def test_demo_values(self):
        self.write("text.txt", "some words\n")
        for names, args in ((["--tokens"], ["--tokens", "5"]),
                            (["FILE", "--tokens", BOTH], ["text.txt", "--tokens", "1000"]),
                            (["--question", "empty"], ["text.txt", "--question", " "]),
                            (["--seed"], ["--seed", "x"]),
                            (["other.txt"], ["text.txt", "other.txt"])):
            self.refused(2, names, "demo", "-m", self.recall, *args)


class Memory(Case):
    def run_with(self, *args):
        return ["run", "-m", self.recall, "-p", "hello", "--max-new-tokens", "2", *args]

    def test_too_small_for_the_weights(self):
        message = self.refused(4, ["--device-memory", "weights", "13.3 MiB", "--prefill-chunk"],
                               *self.run_with("--device-memory", "10MiB"))
        budget = re.search(r"need (\d+) bytes", message).group(1)
        # With that the weights fit, and what the request needs beside them is named.
        message = self.refused(4, ["--device-memory", "tokens need at least"],
                               *self.run_with("--device-memory", budget))
        budget = re.search(r"need at least (\d+) bytes", message).group(1)
        self.succeeds(*self.run_with("--device-memory", budget))

    def test_too_small_for_sink_recent_and_one_token(self):
        # 70 tokens of prompt and answer do not need more than sink, recent and a slot.
        args = self.run_with("--prefill-chunk", "64", "--set-tokens", "1", "--sink", "2",
                             "--recent", "16", "--max-label-age", "8")
        message = self.refused(4, ["--device-memory", "need at least"], *args, "--device-memory",
                               "14900000")
        budget = int(re.search(r"need at least (\d+) bytes", message).group(1))
        self.succeeds(*args, "--device-memory", str(budget))
        self.refused(4, ["--device-memory"], *args, "--device-memory", str(budget - 1))

    def test_smallest_budget_works_for_a_long_prompt(self):
        self.write("text.txt", document())
        args = ["run", "-m", self.recall, "--file", "text.txt", "--max-new-tokens", "4",
                "--prefill-chunk", "128"]
        message = self.refused(4, ["need at least"], *args, "--device-memory", "16MB")
        budget = re.search(r"need at least (\d+) bytes", message).group(1)
        answer = self.succeeds(*args, "--device-memory", budget)
        self.assertEqual(answer.out, self.succeeds(*args).out)

    def test_host_memory_below_a_page(self):
        self.refused(4, ["--host-memory", "page"], *self.run_with("--host-memory", "1KiB"))

    def test_host_memory_too_small_for_the_prompt(self):
        self.write("text.txt", document())
        args = ["run", "-m", self.recall, "--file", "text.txt", "--max-new-tokens", "4"]
        message = self.refused(4, ["--host-memory", "system memory"], *args, "--host-memory",
                               "2MiB")
        budget = re.search(r"need (\d+) bytes", message).group(1)
        self.succeeds(*args, "--host-memory", budget)

    def test_fill_budget_keeps_heads(self):
        self.write("text.txt", document())
        args = ["run", "-m", self.recall, "--file", "text.txt", "--max-new-tokens", "4"]
        # Room for weights and workspace alone, as the program itself names it, holds no sequence.
        message = self.refused(4, ["alone need"], *args, "--device-memory", "16MB")
        alone = re.search(r"alone need (\d+) bytes", message).group(1)
        message = self.refused(4, ["need at least"], *args, "--device-memory", alone)
        least = int(re.search(r"need at least (\d+) bytes", message).group(1))
        few = self.succeeds(*args, "--device-memory", str(least + 300000))
        self.assertRegex(few.figure("hit rate"), r"\(\d+ of 16 heads resident")
        all_of_them = self.succeeds(*args, "--device-memory", "1GiB")
        self.assertIn("all 16 heads are resident", all_of_them.figure("hit rate"))
        self.assertEqual(all_of_them.figure("bytes moved per token"), "0 B")
