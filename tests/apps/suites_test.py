"""clo eval SUITE: generated items, their file, and runs that go on where they stopped."""
import json
import os
import re
import signal
import subprocess
import time
from xml.etree import ElementTree

import program
from program import Case

SUITES = {  # arguments that give a few short items
    "ruler": (["--context", "1024", "--items", "1"], 13),
    "niah": (["--context", "1024", "--items", "1", "--depths", "2"], 2),
    "infinite": (["--context", "640", "--items", "1"], 6),
    "position": (["--context", "1024", "--items", "2"], 6),
    "length": (["--context", "1024", "--items", "1"], 7),
    "longbench": (["--context", "1280", "--items", "1"], 7),
    "multihop": (["--context", "4096", "--items", "1", "--item", "multihop/2_hops/4096/3"], 1),
}


class SuiteCase(Case):
    def eval(self, suite, *args):
        return self.succeeds("eval", suite, "-m", self.recall, "--quiet", *args)

    def lines(self, name="out.jsonl"):
        with open(self.path(name)) as file:
            return [json.loads(line) for line in file]

    def items(self, name="out.jsonl"):
        """Items by id, without what a clock says."""
        found = {}
        for line in self.lines(name):
            if line["kind"] != "item":
                continue
            self.assertNotIn(line["id"], found, "an item stands there twice")
            for result in line["results"].values():
                del result["seconds"]
            found[line["id"]] = line
        return found


class Suites(SuiteCase):
    def test_every_suite_runs_and_adds_up(self):
        for suite, (args, count) in SUITES.items():
            with self.subTest(suite):
                answer = self.eval(suite, *args, "--preset", "dense,default", "-o",
                                   suite + ".jsonl")
                lines = self.lines(suite + ".jsonl")
                self.assertEqual(lines[0]["kind"], "run")
                self.assertEqual(lines[0]["identity"]["suite"], suite)
                items = self.items(suite + ".jsonl")
                self.assertEqual(len(items), count)
                for name, item in items.items():
                    self.assertEqual(set(item["results"]), {"dense", "default"})
                    self.assertLessEqual(item["prompt_tokens"], item["context"])
                    self.assertEqual(item["masked_tokens"] > 0, "masked" in item["task"])
                    self.assertTrue(name.startswith(suite + "/"))
                    for result in item["results"].values():
                        self.assertGreaterEqual(result["score"], 0)
                        self.assertLessEqual(result["score"], 1)
                    if item["gold_tokens"] == 0:
                        continue
                    self.assertEqual(item["results"]["dense"]["gold_rows"], 0)
                    default = item["results"]["default"]
                    heads = 8 * 2
                    if default["steps"] > 0:
                        self.assertEqual(default["gold_rows"],
                                         item["gold_tokens"] * heads * default["steps"])
                        self.assertGreater(default["gold_rows_attended"], 0)
                        self.assertEqual(len(default["gold_share_by_layer"]), 8)
                for summary in (line for line in lines if line["kind"] == "summary"):
                    mine = [i for i in items.values() if i["context"] == summary["context"] and
                            summary["task"] in ("all", i["task"])]
                    self.assertEqual(summary["items"], len(mine))
                    for key, policy in (("score", summary["policy"]), ("dense_score", "dense")):
                        scores = [i["results"][policy]["score"] for i in mine]
                        self.assertAlmostEqual(summary[key], 100 * sum(scores) / len(scores))
                self.assertIn("bytes/tok", answer.out)

    def test_recall_model_finds_needles(self):
        self.eval("niah", "--context", "1024", "--items", "2", "--depths", "3", "-o", "out.jsonl")
        scores = [item["results"]["dense"]["score"] for item in self.items().values()]
        self.assertGreater(sum(scores), 3, scores)

    def test_one_item_alone_is_the_same(self):
        args = ["--context", "1024", "--tasks", "niah_single_1,vt", "--items", "2"]
        self.eval("ruler", *args, "-o", "all.jsonl")
        self.eval("ruler", *args, "--item", "ruler/vt/1024/1", "-o", "one.jsonl")
        one = self.items("one.jsonl")
        self.assertEqual(list(one), ["ruler/vt/1024/1"])
        self.assertEqual(one["ruler/vt/1024/1"], self.items("all.jsonl")["ruler/vt/1024/1"])

    def test_retrieve_then_solve(self):
        for mode in ("fresh", "keep"):
            self.eval("length", "--context", "1536", "--tasks", "prose_start", "--items", "1",
                      "--retrieve-then-solve", mode, "-o", mode + ".jsonl")
            (item,) = self.items(mode + ".jsonl").values()
            recitation = item["results"]["dense"]["recitation"]
            self.assertEqual(set(recitation), {"text", "sentences", "tokens", "exact"})
            self.assertEqual(recitation["exact"], recitation["sentences"] == 1)

    def test_sets_are_measured_where_asked_for(self):
        args = ["--context", "4096", "--items", "1", "--item", "multihop/2_hops/4096/3",
                "--set-tokens", "64", "--preset", "default"]
        self.eval("multihop", *args, "-o", "plain.jsonl")
        self.eval("multihop", *args, "--measure-sets", "-o", "out.jsonl")
        (plain,), (item,) = self.items("plain.jsonl").values(), self.items().values()
        for name, result in item["results"].items():
            sets = result.pop("sets")
            self.assertEqual(sets["modes"], 8 * 4 * result["steps"])
            choosing = 0 if name == "dense" else 8 * 2
            self.assertEqual(sets["overlaps"], choosing * max(0, result["steps"] - 1))
            self.assertLessEqual(sets["overlap_sum"], sets["overlaps"])
        self.assertEqual(item, plain)  # looking changes nothing
        self.refused(3, ["out.jsonl:1", "another run", "measure_sets"], "eval", "multihop", "-m",
                     self.recall, *args, "-o", "out.jsonl")
        self.refused(3, ["--measure-sets and --backend cuda"], "eval", "multihop", "-m",
                     self.recall, *args, "--measure-sets", "--backend", "cuda")

    def test_figures_of_the_suites(self):
        self.eval("ruler", "--context", "1024,2048", "--items", "1", "--tasks", "niah_single_1,vt",
                  "-o", "ruler.jsonl")
        figures = [line for line in self.lines("ruler.jsonl") if line["kind"] == "figure"]
        self.assertEqual([f["name"] for f in figures if f["policy"] == "dense"],
                         ["effective length", "Avg.", "wAvg. (inc)", "wAvg. (dec)"])
        for figure in figures:
            self.assertIn("2 of 13 tasks", figure["note"])
        means = {line["context"]: line["score"] for line in self.lines("ruler.jsonl")
                 if line["kind"] == "summary" and (line["task"], line["policy"]) == ("all", "dense")}
        dense = {f["name"]: f["value"] for f in figures if f["policy"] == "dense"}
        self.assertAlmostEqual(dense["wAvg. (inc)"], (means[1024] + 2 * means[2048]) / 3)
        self.assertAlmostEqual(dense["wAvg. (dec)"], (2 * means[1024] + means[2048]) / 3)
        reached = [context for context, score in means.items() if score >= 85.6]
        self.assertEqual(dense["effective length"], max(reached, default=0))
        self.eval("position", "--context", "1024", "--tasks", "database", "--items", "8",
                  "-o", "position.jsonl", "--html", "page.html")
        names = {f["name"]: f["unit"] for f in self.lines("position.jsonl")
                 if f["kind"] == "figure" and f["policy"] == "default"}
        for what in ("", "gold: "):
            self.assertEqual(names[what + "standard deviation over bins"], "points")
        with open(self.path("page.html")) as file:
            self.assertIn("<h2>Evidence attended, by position</h2>", file.read())

    def test_masked_filler_is_in_no_context(self):
        self.eval("length", "--context", "1536", "--filler", "prose,masked", "--items", "1",
                  "--set-tokens", "20", "--preset", "default", "-o", "out.jsonl")
        items = {item["task"]: item for item in self.items().values()}
        self.assertEqual(set(items), {"prose_start", "prose_end", "masked_start", "masked_end"})
        for task, item in items.items():
            self.assertEqual(item["prompt_tokens"], items["prose_start"]["prompt_tokens"])
            visible = item["prompt_tokens"] - item["masked_tokens"]
            self.assertEqual(visible < 500, task.startswith("masked"))
            for result in item["results"].values():
                rows = sum(visible + step for step in range(1, result["steps"] + 1))
                self.assertEqual(result["rows_in_context"], 8 * 2 * rows)
            self.assertLess(item["results"]["default"]["rows_attended"],
                            item["results"]["default"]["rows_in_context"])
        self.eval("length", "--context", "1536", "--tasks", "masked_end", "--items", "1",
                  "--retrieve-then-solve", "keep", "-o", "keep.jsonl")
        (item,) = self.items("keep.jsonl").values()
        self.assertGreater(item["masked_tokens"], 300)

    def test_without_a_chat_template(self):
        model = self.copy("recall")
        path = os.path.join(model, "tokenizer_config.json")
        with open(path) as file:
            config = json.load(file)
        del config["chat_template"]
        with open(path, "w") as file:
            json.dump(config, file)
        self.succeeds("eval", "niah", "-m", model, "--context", "1024", "--depths", "1", "--items",
                      "1", "-o", "out.jsonl")
        (item,) = self.items().values()
        self.assertGreater(item["gold_tokens"], 5)


    def test_page_needs_nothing_from_elsewhere(self):
        self.eval("niah", "--context", "512,1024", "--items", "1", "--depths", "2", "--preset",
                  "dense,default,hata", "--html", "page.html", "-o", "out.jsonl")
        with open(self.path("page.html")) as file:
            page = file.read()
        for outside in ("http:", "https:", "src=", "href=", "url(", "<script", "@import"):
            self.assertNotIn(outside, page)
        drawings = re.findall(r"<svg.*?</svg>", page, re.S)
        # Three maps of scores, two of evidence, a curve, a scatter, the layers.
        self.assertEqual(len(drawings), 8)
        for drawing in drawings:
            ElementTree.fromstring(drawing)
        for policy in ("dense", "default", "hata"):
            self.assertIn(f"<h3>{policy}</h3>", page)
        # The page of a run that had nothing left to do is the same.
        self.eval("niah", "--context", "512,1024", "--items", "1", "--depths", "2", "--preset",
                  "dense,default,hata", "--html", "again.html", "-o", "out.jsonl")
        with open(self.path("again.html")) as file:
            self.assertEqual(file.read().replace("again.html", "page.html"), page)


def entry(**fields):
    """A line of LongBench."""
    line = dict({"input": "What is the special magic number for amber-falcon?",
                 "context": "Nothing. " * 900 + "The special magic number for amber-falcon is: "
                            "4821377.", "answers": ["4821377"], "length": 1808,
                 "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "x"},
                **fields)
    return json.dumps({name: value for name, value in line.items() if value is not ...}) + "\n"


class LongBench(SuiteCase):
    def test_files_are_run_whole(self):
        self.write("qa.jsonl", entry() + "\n" + entry(answers=["no", "4821377"]))
        self.write("more.jsonl", entry(dataset="trec", input="Question: Who?\nType:",
                                       context="Question: Where?\nType: Place\n" * 9,
                                       answers=["Person"], all_classes=["Person", "Place"]) +
                   entry(dataset="lcc", input="", context="x = f(1)\n" * 200, answers=["x = f(1)"]) +
                   entry(dataset="multifieldqa_zh", input="\u5317\u4eac\u5728\u54ea\u91cc\uff1f",
                         context="\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\u3002" * 99,
                         answers=["\u4e2d\u56fd"]))
        self.eval("longbench", "--data", "qa.jsonl", "more.jsonl", "--context", "1024", "-o",
                  "out.jsonl")
        items = self.items()
        self.assertEqual(set(items), {"longbench/hotpotqa/1024/0", "longbench/hotpotqa/1024/1",
                                      "longbench/trec/1024/0", "longbench/lcc/1024/0",
                                      "longbench/multifieldqa_zh/1024/0"})
        metrics = {item["task"]: item["metric"] for item in items.values()}
        self.assertEqual(metrics, {"hotpotqa": "f1", "trec": "class", "lcc": "edit_similarity",
                                   "multifieldqa_zh": "f1_characters"})
        for item in items.values():
            self.assertLessEqual(item["prompt_tokens"], 1024)
            if item["numbers"]["cut"]:
                self.assertGreater(item["prompt_tokens"], 900)
        self.assertEqual(items["longbench/hotpotqa/1024/0"]["numbers"]["cut"], 1)

    def test_bad_files(self):
        cases = (("{oops\n", ["data.jsonl:1", "JSON"]),
                 (entry() + "\xff\n", ["data.jsonl:2", "JSON"]),
                 (entry() + "[1]\n", ["data.jsonl:2", "object"]),
                 (entry(answers=..., length=...), ["data.jsonl:1", "answers, length"]),
                 (entry(context=5), ["data.jsonl:1", "context"]),
                 (entry(answers="x"), ["data.jsonl:1", "answers", "array"]),
                 (entry(answers=[]), ["data.jsonl:1", "answers"]),
                 (entry(dataset="squad"), ["data.jsonl:1", "squad", "hotpotqa", "repobench-p"]),
                 (entry(dataset="trec"), ["data.jsonl:1", "all_classes"]),
                 ("", ["data.jsonl", "none"]))
        for content, names in cases:
            with self.subTest(names):
                self.write("data.jsonl", content.encode("latin-1"))
                self.refused(3, names, "eval", "longbench", "-m", self.recall, "--data",
                             "data.jsonl")
        self.refused(3, ["nowhere.jsonl", "No such file"], "eval", "longbench", "-m", self.recall,
                     "--data", "nowhere.jsonl")
        self.write("data.jsonl", entry())
        self.refused(2, ["--tasks", "trec", "hotpotqa"], "eval", "longbench", "-m", self.recall,
                     "--data", "data.jsonl", "--tasks", "trec")


class Resume(SuiteCase):
    ARGS = ["--context", "1024", "--tasks", "passkey,number", "--items", "2", "-o", "out.jsonl"]

    def test_goes_on_after_any_cut(self):
        first = self.eval("infinite", *self.ARGS)
        with open(self.path("out.jsonl"), "rb") as file:
            whole = file.read()
        items = self.items()
        ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
        for cut in (ends[0] + 1, ends[2] + 40, ends[3] + 1, ends[-2] + 10, len(whole)):
            self.write("out.jsonl", whole[:cut])
            again = self.eval("infinite", *self.ARGS)
            self.assertEqual(self.items(), items)
            self.assertEqual(again.out, first.out)
            kinds = [line["kind"] for line in self.lines()]
            self.assertEqual(kinds[:5], ["run"] + ["item"] * 4)
            self.assertNotIn("item", kinds[5:])

    def test_goes_on_after_kill(self):
        args = ["--context", "1024", "--tasks", "vt", "--items", "8"]
        self.eval("ruler", *args, "-o", "whole.jsonl")
        whole = self.items("whole.jsonl")
        for lines in (2, 5):
            run = subprocess.Popen([program.CLO, "eval", "ruler", "-m", self.recall, "--quiet",
                                    *args, "-o", "out.jsonl"], cwd=self.folder,
                                   stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + program.SECONDS
            while time.monotonic() < deadline and run.poll() is None:
                if os.path.exists(self.path("out.jsonl")):
                    with open(self.path("out.jsonl"), "rb") as file:
                        if file.read().count(b"\n") >= lines:
                            break
                time.sleep(0.01)
            run.send_signal(signal.SIGKILL)
            run.wait()
        self.eval("ruler", *args, "-o", "out.jsonl")
        self.assertEqual(self.items(), whole)

    def test_a_file_of_another_run_is_refused(self):
        self.eval("infinite", *self.ARGS)
        for names, args in ((["seed", "0", "1"], ["--seed", "1"]),
                            (["policies"], ["--kv-ratio", "0.2"]),
                            (["kv_type"], ["--kv-type", "int8"])):
            self.refused(3, ["out.jsonl:1", "another run", *names], "eval", "infinite", "-m",
                         self.recall, *self.ARGS, *args)
        self.refused(3, ["out.jsonl:1", "another run", "suite"], "eval", "niah", "-m", self.recall,
                     "--context", "1024", "-o", "out.jsonl")

    def test_files_that_are_no_run_are_refused(self):
        for content, names in (("hello\n", ["out.jsonl:1"]), ("{}\n", ["out.jsonl:1"]),
                               ("half", ["out.jsonl:1", "half a line"])):
            self.write("out.jsonl", content)
            self.refused(3, names, "eval", "infinite", "-m", self.recall, *self.ARGS)
        os.remove(self.path("out.jsonl"))
        self.eval("infinite", *self.ARGS)
        with open(self.path("out.jsonl")) as file:
            lines = file.readlines()
        for damaged, line in ((lines[:1] + ["{\n"] + lines[2:], 2), (lines[:3] + lines[2:3], 4),
                              (lines[:2] + ['{"kind":"item"}\n'], 3)):
            self.write("out.jsonl", "".join(damaged))
            self.refused(3, [f"out.jsonl:{line}"], "eval", "infinite", "-m", self.recall,
                         *self.ARGS)


class BadSuites(SuiteCase):
    def refuse(self, status, names, suite, *args):
        self.refused(status, names, "eval", suite, "-m", self.recall, *args)

    def test_unknown_names(self):
        self.refuse(2, ["frobnicate", "ruler", "niah", "infinite", "recall"], "frobnicate")
        self.refuse(2, ["--tasks", "vtt", "niah_single_1", "fwe"], "ruler", "--tasks", "vt,vtt")
        self.refuse(2, ["--item", "ruler/vt/9", "ruler/niah_single_1/4096/0"], "ruler", "--item",
                    "ruler/vt/9")
        self.refuse(2, ["--filler", "noise", "whitespace", "masked"], "length", "--filler", "noise")
        self.refuse(2, ["--retrieve-then-solve", "often", "fresh", "keep"], "length",
                    "--retrieve-then-solve", "often")
        self.refuse(2, ["--against", "hata", "dense"], "ruler", "--against", "hata")
        self.refuse(2, ["--preset", "fast", "hata"], "ruler", "--preset", "default,fast")

    def test_numbers_out_of_range(self):
        for items in ("0", "-1"):
            self.refuse(2, ["--items", "1 to", items], "ruler", "--items", items)
        self.refuse(2, ["--depths", "0"], "niah", "--depths", "0")
        self.refuse(2, ["--context", "different", "512 twice"], "ruler", "--context", "512,512")
        self.refuse(2, ["--context", "32768", "100000"], "ruler", "--context", "4096,100000")

    def test_context_too_short(self):
        self.refuse(3, ["multihop/2_hops/1024/0", "1024"], "multihop", "--context", "1024")

    def test_model_without_a_tokenizer(self):
        model = os.path.join(program.SOURCE, "tests", "golden", "models", "llama3")
        self.refused(3, ["tokenizer"], "eval", "ruler", "-m", model, "--context", "1024")

    def test_output_that_cannot_be_written(self):
        self.refuse(3, ["nowhere/out.jsonl"], "ruler", "-o", "nowhere/out.jsonl")
