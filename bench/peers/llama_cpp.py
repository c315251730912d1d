#!/usr/bin/env python3
"""CLO on the CPU beside llama.cpp, on one GGUF file.

Usage: llama_cpp.py tokens|perplexity|speed|load -m MODEL.gguf [--clo PROGRAM] [-o FILE] ...
tokens      greedy answers to the prompts of prompts.json, and where they part
perplexity  of the same tokens of a text, in windows that each start afresh
speed       prefill and decode, in turns, each run in a process of its own
load        time until a model takes prompts, and memory
Appends JSON lines to -o. Needs a build of clo, and the package llama-cpp-python: best built for the
machine (-DGGML_NATIVE=ON), by clang where the processor has AMX.
"""
import argparse
import hashlib
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from llama_cpp_tasks import ANSWER_TOKENS, CONTEXT, WINDOW

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Flash attention, the types of K and V, and whether weights are laid out anew (for AMX where there
# is one). A quantised V needs flash attention.
VARIANTS = [{"flash": flash, "k": k, "v": v, "repack": repack} for repack in (True, False)
            for flash, k, v in ((False, "f16", "f16"), (False, "q8_0", "f16"),
                                (True, "f16", "f16"), (True, "q8_0", "q8_0"))]
KEPT = 2  # of them after the first round, the best ones
POLICIES = {"dense": ["--preset", "dense"],
            "default": ["--preset", "default", "--kv-ratio", "0.1"]}


class Tasks:
    """Asks llama.cpp, in a process of its own for every task."""

    def __init__(self, args):
        self.common = {"model": args.model, "threads": args.threads, "repack": not args.no_repack}

    def __call__(self, name, **task):
        run = subprocess.run([sys.executable, str(HERE / "llama_cpp_tasks.py"), name],
                             input=json.dumps(self.common | task), capture_output=True, text=True)
        if run.returncode < 0:
            sys.exit(f"llama_cpp.py: llama.cpp ended with signal {-run.returncode} in the task "
                     f"{name}. GCC 12 compiles its AMX code wrong; build it with clang, or try "
                     "--no-repack")
        if run.returncode != 0:
            sys.exit(run.stderr.strip())
        return json.loads(run.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------- CLO

class Clo:
    def __init__(self, program, model, threads):
        self.program, self.model, self.threads = program, model, threads

    def __call__(self, *words):
        """Standard output, and the most memory that the process held."""
        command = [self.program, *words, "-m", self.model]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            if process.returncode != 0:
                sys.exit(f"llama_cpp.py: clo ended with {process.returncode}: {err.read().strip()}")
            return out.read(), usage.ru_maxrss * 1024

    def engine(self):
        return ["--backend", "cpu", "--threads", str(self.threads)]

    def run(self, text_file, tokens, *flags):
        """The answer to a raw prompt as `clo run --json` gives it, and the peak of memory."""
        out, peak = self("run", "--raw", "-f", text_file, "--json", "--ignore-eos",
                         "--temperature", "0", "--max-new-tokens", str(tokens), *self.engine(),
                         *flags)
        return json.loads(out), peak

    def encode(self, text_file):
        return [int(line) for line in self("inspect", "--token-ids", text_file)[0].split()]

    def planned(self, *flags):
        out, _ = self("inspect", "--context", str(CONTEXT), *self.engine(), *flags)
        number, unit = re.search(r"([\d.]+) (\w+) needed", out).groups()
        return float(number) * UNITS[unit]


# ------------------------------------------------------------------------------------- results

class Results:
    """Prints lines, and appends them to a file when all are there."""

    def __init__(self, args, clo, peer):
        about = peer("about")
        self.output = args.output
        self.lines = [{"kind": "run", "bench": "llama.cpp, " + args.what, "commit": commit(),
                       "command": command_line(), "device": {"cpu": cpu_name(),
                                                             "cores": os.cpu_count()},
                       "threads": clo.threads, "model": os.path.basename(clo.model),
                       "load_average": os.getloadavg()[0], "repack": not args.no_repack,
                       **about}]

    def add(self, **line):
        self.lines.append({"kind": "point", **line})

    def write(self):
        if not self.output:
            return
        with open(self.output, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)


def commit():
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
                         capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def command_line():
    """As typed, without the folders of this machine."""
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    return " ".join(os.path.basename(word) if word.startswith("/") else word for word in words)


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"model name\s*: (.*)", file.read())
    return found.group(1) if found else "unknown"


class Others:
    """How many cores the rest of the machine kept busy, or was given less by its host."""

    def __init__(self):
        self.start = self.now()

    @staticmethod
    def now():
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        own = sum(sum(resource.getrusage(who)[:2])
                  for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return time.monotonic(), busy - own

    def cores(self):
        end = self.now()
        return (end[1] - self.start[1]) / max(end[0] - self.start[0], 1e-9)


class Texts:
    """Texts of an exact number of tokens, the same ones on both sides."""

    def __init__(self, clo, peer, folder, files):
        self.clo, self.peer, self.folder = clo, peer, folder
        self.text = "".join(pathlib.Path(name).read_text(encoding="utf-8") for name in files)

    def cut(self, tokens):
        part = self.peer("cut", text=self.text, tokens=tokens)
        path = os.path.join(self.folder, f"{tokens}.txt")
        pathlib.Path(path).write_text(part["text"], encoding="utf-8", newline="")
        if self.clo.encode(path) != part["ids"]:
            sys.exit(f"llama_cpp.py: the token ids of the first {tokens} tokens differ between "
                     "clo and llama.cpp")
        return path, part["ids"]


# ------------------------------------------------------------------------------------ commands

def tokens_command(args, clo, peer, folder, results):
    prompts = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
    paths = []
    for i, prompt in enumerate(prompts):
        paths.append(os.path.join(folder, f"{i}.txt"))
        pathlib.Path(paths[-1]).write_text(prompt, encoding="utf-8", newline="")
    own_ids = [clo.encode(path) for path in paths]

    def own(program, weights):
        return [program.run(path, ANSWER_TOKENS, "--preset", "dense", "--weights", weights)[0]
                ["tokens"] for path in paths]

    def theirs(others, kind=(), **change):
        return peer("answer", prompts=prompts, others=others, kind=kind, **change)

    answers = {f"clo {weights}": own(clo, weights) for weights in args.weights.split(",")}
    usual = theirs(answers)
    same_ids = sum(a == b["prompt_ids"] for a, b in zip(own_ids, usual))
    print(f"prompts with the same token ids: {same_ids} of {len(prompts)}")
    results.add(what="prompts", prompts=len(prompts), answer_tokens=ANSWER_TOKENS,
                same_ids=same_ids)
    for name in list(answers):
        report_partings(name, "llama.cpp", usual, results)
    answers["llama.cpp"] = [answer["tokens"] for answer in usual]
    # What llama.cpp's own roundings change: the same file, its weights laid out otherwise.
    other = theirs({}, repack=peer.common["repack"] is False)
    answers["llama.cpp, other layout"] = [answer["tokens"] for answer in other]
    if args.exact:
        exact = os.path.join(folder, "f32.gguf")
        peer("expand", to=exact)
        wide = {"clo, all f32": own(Clo(clo.program, exact, clo.threads), "f32")}
        reference = theirs(wide, (False, "f32", "f32"), model=exact)
        report_partings("clo, all f32", "llama.cpp, all f32", reference, results)
        answers |= wide
        answers["llama.cpp, all f32"] = [answer["tokens"] for answer in reference]
    report_pairs(answers, results)


def report_partings(name, who, answers, results):
    partings = [{"prompt": i, **answer["partings"][name]} for i, answer in enumerate(answers)
                if name in answer["partings"]]
    print(f"{name} and {who}: {len(answers) - len(partings)} of {len(answers)} answers equal")
    for parting in partings:
        best, second, own = parting["best"], parting["second"], parting["other"]
        print(f"  prompt {parting['prompt']}, token {parting['position']}: {best['text']!r} "
              f"{best['logit']:.3f}, then {second['text']!r} {second['logit']:.3f}, difference "
              f"{parting['difference']:.3f}; clo {own['text']!r}")
    results.add(what="partings", who=[name, who], equal=len(answers) - len(partings),
                partings=partings)


def report_pairs(answers, results):
    """How many answers are equal, and how many tokens are before answers part, of every pair."""
    names = list(answers)
    for i, one in enumerate(names):
        for other in names[i + 1:]:
            pairs = list(zip(answers[one], answers[other]))
            equal = sum(a == b for a, b in pairs)
            same = statistics.mean(len(os.path.commonprefix([a, b])) for a, b in pairs)
            print(f"  {one + ' | ' + other:44} {equal:3} equal, {same:.1f} tokens until they part")
            results.add(what="pair", who=[one, other], equal=equal, mean_tokens_alike=same)


def perplexity_command(args, clo, peer, folder, results):
    path, ids = Texts(clo, peer, folder, args.text).cut(args.tokens)
    output = os.path.join(folder, "fidelity.jsonl")
    clo("eval", "fidelity", "--text", path, "--context", str(WINDOW), "--compared",
        str(WINDOW - 1), "--all-windows", "--reference-weights", args.weights, "--weights",
        args.weights, "--presets", "dense", "-o", output, "--quiet", *clo.engine())
    with open(output, encoding="utf-8") as file:
        own = [json.loads(line) for line in file][1]
    theirs = peer("perplexity", ids=ids)
    if own["tokens"] != theirs["tokens"]:
        sys.exit(f"llama_cpp.py: clo scored {own['tokens']} tokens, llama.cpp {theirs['tokens']}")
    ratio = own["perplexity"] / theirs["perplexity"]
    print(f"{len(ids)} tokens, {own['tokens']} scored: clo {own['perplexity']:.4f}, llama.cpp "
          f"{theirs['perplexity']:.4f}, ratio {ratio:.5f}")
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    results.add(text_tokens=len(ids), text_sha256=digest, window=WINDOW, scored=own["tokens"],
                weights=args.weights, clo=own["perplexity"], llama_cpp=theirs["perplexity"],
                ratio=ratio)


def speed_command(args, clo, peer, folder, results):
    texts = Texts(clo, peer, folder, args.text)
    points = [("prefill", args.prefill, 0)] + [
        ("decode", context, args.tokens) for context in args.contexts]
    for what, context, tokens in points:
        path, ids = texts.cut(context)
        rates, others = {}, Others()
        variants = [variant for variant in VARIANTS if not (args.no_repack and variant["repack"])]
        for turn in range(args.rounds):
            for name, flags in POLICIES.items():
                report = clo.run(path, tokens + 1, *flags)[0]["report"]
                rate = (report["prompt_tokens"] / report["prefill_seconds"]
                        if what == "prefill" else report["decode_tokens_per_second"])
                rates.setdefault("clo " + name, []).append(rate)
            for variant in variants:
                answer = peer("speed", ids=ids, tokens=tokens, **variant)
                rates.setdefault(variant_name(variant), []).append(answer[what])
            if turn == 0:
                variants.sort(key=lambda v: -rates[variant_name(v)][0])
                variants = variants[:KEPT]
        report_speed(what, context, tokens, rates, others.cores(), results)


def variant_name(variant):
    return (f"llama.cpp flash {'on' if variant['flash'] else 'off'}, K {variant['k']}, "
            f"V {variant['v']}{'' if variant['repack'] else ', as in the file'}")


def report_speed(what, context, tokens, rates, others, results):
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rounds = max(map(len, rates.values()))
    # What was measured once was slower in that round than what is left.
    best = max((name for name in medians if name.startswith("llama")
                and len(rates[name]) == rounds), key=medians.get)
    print(f"{what} at {context} tokens, other programs used {others:.2f} cores, llama.cpp's best: "
          f"{best}")
    for name, rate in medians.items():
        ratio = rate / medians[best]
        print(f"  {name:54} {rate:9.1f} tokens/s  x {ratio:.3f}   {len(rates[name])} rounds, "
              f"{min(rates[name]):.1f} to {max(rates[name]):.1f}", flush=True)
        results.add(what=what, context=context, new_tokens=tokens, who=name,
                    tokens_per_second=rates[name], median=rate, ratio_to_best=ratio,
                    other_programs_cores=others)


def load_command(args, clo, peer, folder, results):
    texts = Texts(clo, peer, folder, args.text)
    short, short_ids = texts.cut(1)
    long, long_ids = texts.cut(CONTEXT - 8)
    flags = ["--context", str(CONTEXT)]
    seconds, peaks = {"clo": [], "llama.cpp": []}, {"clo": [], "llama.cpp": [], "net": []}
    for _ in range(args.rounds + 1):
        answer, peak = clo.run(short, 1, "--preset", "dense", *flags)
        seconds["clo"].append(answer["load_seconds"])
        peaks["clo"].append(peak)
        theirs = peer("load", ids=short_ids)
        seconds["llama.cpp"].append(theirs["seconds"])
        peaks["llama.cpp"].append(theirs["peak_bytes"])
        peaks["net"].append(theirs["peak_bytes"] - theirs["before_bytes"])
    # The first round brings the file into the page cache.
    times = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    held = {name: statistics.median(values[1:]) for name, values in peaks.items()}
    print(f"load: clo {times['clo']:.3f} s, llama.cpp {times['llama.cpp']:.3f} s, ratio "
          f"{times['clo'] / times['llama.cpp']:.3f}")
    results.add(what="load", rounds=args.rounds, clo_seconds=seconds["clo"][1:],
                llama_cpp_seconds=seconds["llama.cpp"][1:],
                ratio=times["clo"] / times["llama.cpp"])
    report_memory("one token", held["clo"], held["llama.cpp"], held["net"], None, "dense", results)
    theirs = peer("load", ids=long_ids)
    for name, policy in POLICIES.items():
        _, peak = clo.run(long, 8, *policy, *flags)
        report_memory(f"{len(long_ids)} tokens", peak, theirs["peak_bytes"],
                      theirs["peak_bytes"] - theirs["before_bytes"], clo.planned(*policy), name,
                      results)


def report_memory(when, own, theirs, net, planned, policy, results):
    mib = 1 << 20
    text = f"memory, {when}, {policy}: clo {own / mib:.0f} MiB, llama.cpp {theirs / mib:.0f} MiB" \
           f" ({net / mib:.0f} without Python), ratio to the latter {own / net:.3f}"
    line = {"what": "memory", "when": when, "policy": policy, "context": CONTEXT, "clo_bytes": own,
            "llama_cpp_bytes": theirs, "llama_cpp_without_python_bytes": net, "ratio": own / net}
    if planned:
        text += f"; planned {planned / mib:.0f} MiB, {own / planned:.3f} of it used"
        line |= {"planned_bytes": planned, "used_of_planned": own / planned}
    print(text)
    results.add(**line)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    for name in ("tokens", "perplexity", "speed", "load"):
        command = sub.add_parser(name)
        command.add_argument("-m", "--model", required=True, help="a GGUF file")
        command.add_argument("--clo", default=str(ROOT / "build/release/apps/clo"),
                             help="the program (build/release/apps/clo)")
        command.add_argument("--threads", type=int, default=2, help="of both (2)")
        command.add_argument("--no-repack", action="store_true",
                             help="llama.cpp keeps weights as they are in the file (no AMX)")
        command.add_argument("-o", "--output", help="append JSON lines to this file")
        if name in ("tokens", "perplexity"):
            command.add_argument("--weights", default="auto", help="of clo (auto)" + (
                "; several with commas" if name == "tokens" else ""))
        if name == "tokens":
            command.add_argument("--exact", action="store_true",
                                 help="also both on a copy of the file with 32-bit weights")
        else:
            command.add_argument("--text", nargs="+", required=True,
                                 help="text files, one after another; the first tokens are used")
        if name == "perplexity":
            command.add_argument("--tokens", type=int, default=30000, help="of the text (30000)")
        if name in ("speed", "load"):
            command.add_argument("--rounds", type=int, default=5, help="medians of so many (5)")
        if name == "speed":
            command.add_argument("--tokens", type=int, default=64, help="decoded and timed (64)")
            command.add_argument("--prefill", type=int, default=2048, help="tokens read (2048)")
            command.add_argument("--contexts", type=int, nargs="+", default=[512, 7500],
                                 help="tokens before decode (512 7500)")
    return parser.parse_args()


def main():
    args = arguments()
    for path in (args.model, args.clo):
        if not os.path.isfile(path):
            sys.exit(f"llama_cpp.py: {path} is no file")
    clo = Clo(args.clo, args.model, args.threads)
    peer = Tasks(args)
    results = Results(args, clo, peer)
    commands = {"tokens": tokens_command, "perplexity": perplexity_command,
                "speed": speed_command, "load": load_command}
    with tempfile.TemporaryDirectory() as folder:
        commands[args.what](args, clo, peer, folder, results)
    results.write()


if __name__ == "__main__":
    main()
