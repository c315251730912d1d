"""The program on a GPU; skipped, by name, where there is none."""
import json

import program
from program import Case, FACTS, document, question


class Gpu(Case):
    def setUp(self):
        super().setUp()
        self.env = {"CUDA_VISIBLE_DEVICES": program.DEVICES or "0"}
        seen = self.clo("inspect", "-m", self.recall, env=self.env)
        if "compute capability" not in seen.out:
            self.skipTest("no GPU that can be used")
        self.inspected = seen.out

    def answers(self, *args):
        self.write("text.txt", document())
        keys = [flag for key in FACTS for flag in ("--question", question(key))]
        return self.succeeds("run", "-m", self.recall, "--context-file", "text.txt", *keys,
                             "--stop", "\n", "--json", *args, env=self.env).json()

    def test_auto_takes_it_and_says_so(self):
        self.assertRegex(self.inspected, r"backend +cuda")
        self.assertRegex(self.inspected, r"CUDA context +device +\d")
        for answer in self.answers():
            self.assertIn("cuda", answer["report"]["backend"])

    def test_finds_the_facts_with_rows_fetched(self):
        for answer, value in zip(self.answers("--persistent-heads", "0"), FACTS.values()):
            self.assertIn(value, answer["text"])
            self.assertGreater(answer["report"]["total"]["rows_fetched"], 0)

    def test_profiles_are_recorded_and_trained_on_it(self):
        self.write("text.txt", document(lines=70))
        args = ["profile", "-m", self.recall, "--text", "text.txt", "--context", "384,384", "--decode",
                "64", "--windows", "2", "--iterations", "40", "--quiet", "-o"]
        answer = self.succeeds(*args, "gpu.profile", "--json", "gpu.jsonl", env=self.env)
        self.assertIn("recorded on the GPU", answer.out)
        self.assertNotIn("trained on the CPU", answer.out)
        self.succeeds(*args, "cpu.profile", "--json", "cpu.jsonl", "--backend", "cpu", env=self.env)
        gpu, cpu = ([json.loads(line) for line in open(self.path(name))]
                    for name in ("gpu.jsonl", "cpu.jsonl"))
        for figure in ("recall_random", "recall_trained", "recall_products", "set_overlap",
                       "mass_outside"):
            self.assertAlmostEqual(gpu[1][figure], cpu[1][figure], delta=0.03, msg=figure)
        self.succeeds("run", "-m", self.recall, "--profile", self.path("gpu.profile"), "-p", "hello",
                      "--max-new-tokens", "2", env=self.env)
        answer = self.succeeds(*args, "p.profile", "--recipe", "published", "--backend", "cuda",
                               env=self.env)
        self.assertIn("trained on the CPU (the published recipe has no other trainer)", answer.out)

    def test_no_device_is_said(self):
        message = self.refused(5, ["--backend cpu"], "run", "-m", self.recall, "-p", "hello",
                               "--backend", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
        self.assertIn("device", message)

    def test_too_small_for_the_context_of_cuda(self):
        self.refused(4, ["--device-memory"], "run", "-m", self.recall, "-p", "hello",
                     "--device-memory", "100MiB", env=self.env)

    def test_f32_is_refused_with_advice(self):
        self.refused(3, ["--dtype bf16"], "run", "-m", self.recall, "-p", "hello", "--backend",
                     "cuda", "--dtype", "f32", env=self.env)

    def test_weights_of_another_plain_type_are_refused(self):
        for weights in ("f16", "f32"):
            self.refused(3, ["--weights " + weights, "--backend cpu"], "run", "-m", self.recall,
                         "-p", "hello", "--backend", "cuda", "--weights", weights, env=self.env)

    def test_weights_in_blocks(self):
        # With 4 bits the model of 7 million weights forgets the facts, on any backend.
        for answer, value in zip(self.answers("--weights", "int8"), FACTS.values()):
            self.assertIn(value, answer["text"])
        for answer in self.answers("--weights", "q4"):
            self.assertGreater(answer["report"]["new_tokens"], 0)

    def test_rows_of_8_bits(self):
        for kv_type, row_bytes in (("int8", 144), ("fp8", 128)):
            answers = self.answers("--kv-type", kv_type, "--persistent-heads", "0")
            for answer, value in zip(answers, FACTS.values()):
                self.assertIn(value, answer["text"])
                self.assertGreater(answer["report"]["total"]["rows_fetched"], 0)
                self.assertEqual(answer["report"]["row_bytes"], row_bytes)

    def test_rows_of_other_types_are_refused(self):
        for kv_type in ("f32", "f16"):
            self.refused(3, ["--kv-type", kv_type, "--backend cpu"], "run", "-m", self.recall,
                         "-p", "hello", "--backend", "cuda", "--kv-type", kv_type, env=self.env)
            shown = self.succeeds("inspect", "-m", self.recall, "--kv-type", kv_type, env=self.env)
            self.assertRegex(shown.out, r"backend +cpu; .*" + kv_type)

    def test_kernels_one_after_the_other_are_refused(self):
        self.refused(3, ["CUDA_LAUNCH_BLOCKING"], "run", "-m", self.recall, "-p", "hello",
                     "--backend", "cuda", env=dict(self.env, CUDA_LAUNCH_BLOCKING="1"))
