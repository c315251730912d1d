"""Runs the binary under test, and makes models and texts for it."""
import errno
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

CLO = SOURCE = None  # set by cli_test.py
DEVICES = None  # the GPUs there are: CUDA_VISIBLE_DEVICES, or None for all

SECONDS = 120  # the longest a run may take on a busy machine


class Answer:
    """What one run of the program gave."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    def json(self):
        return [json.loads(line) for line in self.out.splitlines()]

    def figure(self, name):
        """The value of a line of the report."""
        found = re.search(rf"^  {re.escape(name)} +(.*)$", self.err, re.M)
        return found.group(1) if found else None


class Case(unittest.TestCase):
    longMessage = True

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="clo_cli_")
        self.addCleanup(shutil.rmtree, self.folder)

    @property
    def recall(self):
        return os.path.join(SOURCE, "models", "recall-7m")

    def clo(self, *args, stdin=b"", env=None):
        run = subprocess.run([CLO, *args], input=stdin, capture_output=True, cwd=self.folder,
                             timeout=SECONDS, env=dict(os.environ, **(env or {})))
        # Strict: what the program prints is UTF-8.
        return Answer(run.returncode, run.stdout.decode(), run.stderr.decode())

    def succeeds(self, *args, **kwargs):
        answer = self.clo(*args, **kwargs)
        self.assertEqual(answer.status, 0, answer.err)
        return answer

    def refused(self, status, names, *args, **kwargs):
        """The program ends with `status` and one message that has every one of `names` in it,
        prints nothing else, and leaves no file behind."""
        before = self.files()
        answer = self.clo(*args, **kwargs)
        self.assertEqual(answer.status, status, answer.out + answer.err)
        self.assertEqual(answer.out, "", "standard output must be clean")
        lines = answer.err.splitlines()
        self.assertEqual(len(lines), 1, answer.err)
        self.assertTrue(lines[0].startswith("clo: "), answer.err)
        for name in names:
            self.assertIn(name, lines[0])
        self.assertEqual(self.files(), before, "a failed run left files")
        return lines[0]

    def files(self):
        return sorted(os.path.join(where, name) for where, _, names in os.walk(self.folder)
                      for name in names)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return self.path(name)

    # Models

    def copy(self, name):
        """A copy of models/recall-7m ("recall") or of a model under tests/golden/models with the
        tokenizer of recall-7m, which those lack."""
        model = self.path("model")
        os.mkdir(model)
        if name != "recall":
            golden = os.path.join(SOURCE, "tests", "golden", "models", name)
            for file in os.listdir(golden):
                if file != "golden.safetensors":
                    shutil.copy(os.path.join(golden, file), model)
        for file in os.listdir(self.recall):
            if name == "recall" or file.startswith("tokenizer"):
                shutil.copy(os.path.join(self.recall, file), model)
        return model


def edit_json(folder, name, change):
    path = os.path.join(folder, name)
    with open(path) as file:
        value = json.load(file)
    change(value)
    with open(path, "w") as file:
        json.dump(value, file)


def read_tensors(path):
    """The header of a safetensors file as a dict, and the bytes after it."""
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:8 + length]), content[8 + length:]


def write_tensors(path, header, data):
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def edit_tensors(path, change):
    """Changes the header of a safetensors file; its data stays."""
    header, data = read_tensors(path)
    change(header)
    write_tensors(path, header, data)


def last_tensor(header):
    """The name of the tensor that ends last."""
    return max((name for name in header if name != "__metadata__"),
               key=lambda name: header[name]["data_offsets"][1])


FACTS = {"amber-falcon": "4821377", "silver-otter": "7710429"}


def question(key):
    return f"What is the special magic number for {key}?"


def document(lines=60, seed=1, facts=FACTS):
    """Lines of words with a fact planted here and there; about 15 tokens a line."""
    words = ("the of a stone river cloud table green quick slow boat window paper night road "
             "garden winter early").split()
    pick = random.Random(seed)
    text = [" ".join(pick.choice(words) for _ in range(12)).capitalize() + "."
            for _ in range(lines)]
    for i, (key, value) in enumerate(facts.items()):
        text.insert((i + 1) * lines // (len(facts) + 1),
                    f"The special magic number for {key} is: {value}.")
    return "\n".join(text) + "\n"


class Terminal:
    """The program on a terminal of its own, as a person would meet it."""

    def __init__(self, *args, cwd, env=None):
        self.text = ""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(CLO, [CLO, *args], dict(os.environ, **(env or {})))
        self.status = None

    def type(self, text):
        os.write(self.descriptor, text.encode())

    def read(self):
        """Whether more came; False at the end of the program."""
        ready, _, _ = select.select([self.descriptor], [], [], SECONDS)
        if not ready:
            raise TimeoutError("the program is silent: " + self.text)
        try:
            block = os.read(self.descriptor, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux says so when the other side has gone
                raise
            block = b""
        self.text += block.decode(errors="replace")
        return bool(block)

    def wait_for(self, pattern, start=0):
        """Reads until `pattern` occurs at or after `start`; returns where it ends."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = re.compile(pattern).search(self.text, start)
            if found:
                return found.end()
            if time.monotonic() > deadline or not self.read():
                raise AssertionError(f"no {pattern!r} in: {self.text[start:]}")

    def end(self):
        """Reads to the end; returns the exit status."""
        while self.read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def close(self):
        if self.status is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        os.close(self.descriptor)
