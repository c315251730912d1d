#!/usr/bin/env python3
"""What llama_cpp.py asks of llama.cpp, each task in a process of its own.

Usage: llama_cpp_tasks.py TASK < JSON     prints the answer as JSON. Needs llama-cpp-python.
"""
import ctypes
import json
import os
import pathlib
import re
import resource
import sys
import time

# Beside this file lies one with the library's name: this folder must not be searched for it.
HERE = pathlib.Path(__file__).resolve().parent
sys.path = [place for place in sys.path if pathlib.Path(place or ".").resolve() != HERE]

ANSWER_TOKENS = 64  # of a greedy answer
WINDOW = 2048  # of `perplexity`, and the most tokens that are handed over at once
CONTEXT = 8192  # of `load`


class Peer:
    """A model and a context of llama.cpp, through its C interface."""

    def __init__(self, task, context, flash=None, k="f16", v="f16", all_logits=False):
        self.lib = library()
        lib = self.lib
        model_options = lib.llama_model_default_params()
        model_options.n_gpu_layers = 0
        model_options.use_extra_bufts = task["repack"]
        self.model = lib.llama_model_load_from_file(os.fsencode(task["model"]), model_options)
        if not self.model:
            sys.exit(f"llama.cpp: llama.cpp cannot load {task['model']}")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocab_size = lib.llama_vocab_n_tokens(self.vocab)
        self.all_logits = all_logits
        options = lib.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = WINDOW
        options.n_outputs_max = WINDOW if all_logits else 0
        options.n_threads = options.n_threads_batch = task["threads"]
        if flash is not None:
            options.flash_attn_type = (lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash
                                       else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        types = {"f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
        options.type_k, options.type_v = types[k], types[v]
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            sys.exit("llama.cpp: llama.cpp refuses this context")

    def encode(self, text):
        """Token ids of a text as it is; a BOS only where the file asks for one."""
        ids = (self.lib.llama_token * (len(text) + 8))()
        count = self.lib.llama_tokenize(self.vocab, text, len(text), ids, len(ids), True, False)
        return list(ids[:count])

    def bytes_of(self, ids):
        buffer = ctypes.create_string_buffer(1024)
        pieces = []
        for token in ids:
            count = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
            pieces.append(buffer.raw[:count])
        return b"".join(pieces)

    def read(self, ids):
        """Appends tokens to the context, and computes the logits of the last one."""
        for first in range(0, len(ids), WINDOW):
            part = ids[first:first + WINDOW]
            tokens = (self.lib.llama_token * len(part))(*part)
            self.must(self.lib.llama_decode(
                self.context, self.lib.llama_batch_get_one(tokens, len(part))))

    def read_window(self, ids):
        """The logits after every token of a window that starts afresh: one row each."""
        self.clear()
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self.must(self.lib.llama_decode(self.context, batch))
        self.lib.llama_batch_free(batch)
        return self.array(self.lib.llama_get_logits(self.context), len(ids))

    def logits(self):
        return self.array(self.lib.llama_get_logits_ith(self.context, -1), 1)[0]

    def array(self, pointer, rows):
        import numpy
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        count = rows * self.vocab_size
        floats = (ctypes.c_float * count).from_address(address)
        return numpy.frombuffer(floats, numpy.float32).reshape(rows, self.vocab_size)

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def warm_up(self):
        """One token that is forgotten again, as llama.cpp's own programs begin."""
        self.lib.llama_set_warmup(self.context, True)
        self.read([self.lib.llama_vocab_eos(self.vocab)])
        self.lib.llama_set_warmup(self.context, False)
        self.clear()

    @staticmethod
    def must(status):
        if status != 0:
            sys.exit(f"llama.cpp: llama_decode failed with {status}")


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def no_log(_level, _text, _data):
    pass


def library():
    try:
        from llama_cpp import llama_cpp as lib
    except ImportError:
        sys.exit("llama.cpp: needs the package llama-cpp-python; is PYTHONPATH right?")
    lib.llama_log_set(ctypes.cast(no_log, lib.llama_log_callback), None)
    lib.llama_backend_init()
    return lib


def answer_task(task):
    """Greedy answers, and what the logits say where other answers part from them."""
    peer = Peer(task, 1024, *task["kind"])
    answers = []
    for i, prompt in enumerate(task["prompts"]):
        peer.clear()
        ids = peer.encode(prompt.encode())
        peer.read(ids)
        tokens, partings = [], {}
        for position in range(ANSWER_TOKENS):
            logits = peer.logits()
            tokens.append(int(logits.argmax()))
            for name, others in task["others"].items():
                if name not in partings and others[i][position] != tokens[-1]:
                    partings[name] = describe_parting(peer, logits, position, others[i][position])
            peer.read(tokens[-1:])
        answers.append({"prompt_ids": ids, "tokens": tokens, "partings": partings})
    return answers


def describe_parting(peer, logits, position, other):
    best, second = (int(token) for token in logits.argsort()[:-3:-1])

    def shown(token):
        return {"token": token, "text": peer.bytes_of([token]).decode(errors="replace"),
                "logit": float(logits[token])}

    return {"position": position, "best": shown(best), "second": shown(second),
            "difference": float(logits[best] - logits[second]), "other": shown(other)}


def expand_task(task):
    """A copy of the model with every weight as a 32-bit number, the value it has in the file."""
    lib = library()
    options = lib.llama_model_quantize_default_params()
    options.ftype = lib.LLAMA_FTYPE_ALL_F32
    options.allow_requantize = True
    status = lib.llama_model_quantize(os.fsencode(task["model"]), os.fsencode(task["to"]),
                                      ctypes.byref(options))
    if status != 0:
        sys.exit("llama.cpp: llama.cpp cannot expand this file")
    return {}


def cut_task(task):
    """The first tokens of a text, as text that gives the same tokens again."""
    peer = Peer(task, 256)
    text = task["text"].encode()
    while True:
        ids = peer.encode(text)[:task["tokens"]]
        if len(ids) < task["tokens"]:
            sys.exit(f"llama.cpp: expected a text of {task['tokens']} tokens or more, "
                     f"found {len(ids)}")
        part = peer.bytes_of(ids)
        if peer.encode(part) == ids and is_utf8(part):
            return {"text": part.decode(), "ids": ids}
        # The cut is inside a word: begin one line later.
        text = text[text.index(b"\n") + 1:]


def is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def perplexity_task(task):
    import numpy
    peer = Peer(task, WINDOW, all_logits=True)
    ids = task["ids"]
    total, scored = 0.0, 0
    for first in range(0, len(ids), WINDOW):
        window = ids[first:first + WINDOW]
        rows = peer.read_window(window)
        for row, token in zip(rows[:-1], window[1:]):
            wide = row.astype(numpy.float64)
            top = wide.max()
            total += top + numpy.log(numpy.exp(wide - top).sum()) - wide[token]
            scored += 1
    return {"perplexity": float(numpy.exp(total / scored)), "tokens": scored}


def speed_task(task):
    ids, tokens = task["ids"], task["tokens"]
    peer = Peer(task, len(ids) + tokens + 256, task["flash"], task["k"], task["v"])
    peer.warm_up()
    start = time.perf_counter()
    peer.read(ids)
    token = int(peer.logits().argmax())
    prefilled = time.perf_counter()
    for _ in range(tokens):
        peer.read([token])
        token = int(peer.logits().argmax())
    end = time.perf_counter()
    return {"prefill": len(ids) / (prefilled - start),
            "decode": tokens / (end - prefilled) if tokens else None}


def load_task(task):
    import numpy  # a part of what Python takes, not of llama.cpp
    del numpy
    before = resident_bytes()
    library()
    start = time.perf_counter()
    peer = Peer(task, CONTEXT)
    seconds = time.perf_counter() - start
    peer.read(task["ids"])
    int(peer.logits().argmax())
    return {"seconds": seconds, "before_bytes": before,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def about_task(_task):
    lib = library()
    import llama_cpp
    facts = lib.llama_print_system_info().decode()
    return {"peer": f"llama-cpp-python {llama_cpp.__version__}",
            "peer_build": re.findall(r"(\w+) = 1", facts)}


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


TASKS = {"answer": answer_task, "expand": expand_task, "cut": cut_task,
         "perplexity": perplexity_task, "speed": speed_task, "load": load_task,
         "about": about_task}


if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](json.load(sys.stdin))))
