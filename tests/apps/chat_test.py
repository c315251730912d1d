"""clo run --chat: turns, commands, interruption and what is kept."""
import json
import re

from program import Case, Terminal, document, question


class Chat(Case):
    def setUp(self):
        super().setUp()
        self.text = " ".join(document(18).split())  # above 256 tokens, below a terminal's line

    def chat(self, *args):
        terminal = Terminal("run", "-m", self.recall, "--chat", *args, cwd=self.folder)
        self.addCleanup(terminal.close)
        self.at = terminal.wait_for(r"> ")
        return terminal

    def turn(self, terminal, text, until=r"share attended.*\r\n(\x1b\[K|\r)*> "):
        start = self.at
        terminal.type(text + "\n")
        self.at = terminal.wait_for(until, start)
        return terminal.text[start:self.at]

    def reused(self, turn):
        return int(re.search(r"\((\d+) reused\)", turn).group(1))

    def leave(self, terminal):
        terminal.type("\x04")
        self.assertEqual(terminal.end(), 0, terminal.text)

    def saved(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return json.load(file)

    def test_second_turn_reuses_the_first(self):
        terminal = self.chat("--max-new-tokens", "24")
        first = self.turn(terminal, self.text + " " + question("amber-falcon"))
        self.assertIn("(0 reused)", first)
        second = self.turn(terminal, question("silver-otter"))
        reused = self.reused(second)
        self.assertGreaterEqual(reused, 256)
        # Every full page of the turn before, its question among them.
        before = int(re.search(r"(\d+) prompt", second).group(1))
        third = self.turn(terminal, "And again: " + self.text)
        self.assertGreaterEqual(self.reused(third), before // 256 * 256)
        fourth = self.turn(terminal, question("amber-falcon"))
        self.assertGreaterEqual(self.reused(fourth), self.reused(third) + 256)
        self.leave(terminal)

    def test_interrupt_stops_the_answer_not_the_program(self):
        terminal = self.chat("--ignore-eos", "--max-new-tokens", "30000")
        start = self.at
        terminal.type("hello\n")
        terminal.wait_for(r"hello\r\n(?s:.){150,}", start)  # progress, then an answer
        terminal.type("\x03")
        self.at = terminal.wait_for(r"cancelled(?s:.)*> ", start)
        start = self.at
        terminal.type("again\n")
        terminal.wait_for(r"again\r\n(?s:.){150,}", start)
        terminal.type("\x03")
        self.at = terminal.wait_for(r"cancelled(?s:.)*> ", start)
        self.leave(terminal)

    def test_interrupt_at_the_prompt_ends(self):
        terminal = self.chat()
        terminal.type("\x03")
        self.assertEqual(terminal.end(), 0, terminal.text)

    def test_empty_line_asks_again(self):
        terminal = self.chat("--max-new-tokens", "3")
        terminal.type("\n\n")
        self.assertIn("3 new", self.turn(terminal, "hello"))
        self.leave(terminal)

    def test_lines_from_a_pipe(self):
        answer = self.succeeds("run", "-m", self.recall, "--chat", "--quiet", "--max-new-tokens",
                               "4", stdin=b"hello\r\n\nagain")
        self.assertEqual(answer.err, "")
        self.assertGreaterEqual(len(answer.out.splitlines()), 2)

    def test_line_that_is_not_utf8_is_not_sent(self):
        answer = self.succeeds("run", "-m", self.recall, "--chat", "--max-new-tokens", "4",
                               stdin=b"caf\xe9\nhello\n")
        self.assertIn("not valid UTF-8", answer.err)
        self.assertEqual(answer.err.count("finish reason"), 1)

    def test_line_that_is_too_long_is_not_sent(self):
        answer = self.succeeds("run", "-m", self.recall, "--chat", "--context", "60",
                               "--max-new-tokens", "4", stdin=(self.text + "\nhello\n").encode())
        self.assertIn("--context", answer.err)
        self.assertEqual(answer.err.count("finish reason"), 1)

    def test_help_names_every_command(self):
        terminal = self.chat()
        text = self.turn(terminal, "/help", until=r"space before it(?s:.)*> ")
        for command in ("/reset", "/stats", "/save FILE", "/help", "ctrl-C", "ctrl-D"):
            self.assertIn(command, text)
        self.leave(terminal)

    def test_unknown_command_is_not_sent(self):
        terminal = self.chat("--max-new-tokens", "3")
        text = self.turn(terminal, "/etc/hosts is a file", until=r"is not a command(?s:.)*> ")
        self.assertIn("/etc/hosts", text)
        self.assertNotIn("finish reason", text)
        self.turn(terminal, "/reset now", until=r'takes nothing after it, found "now"(?s:.)*> ')
        self.turn(terminal, " /etc/hosts is a file")
        self.turn(terminal, "/save all.json", until=r"wrote 2 messages(?s:.)*> ")
        self.assertEqual(self.saved("all.json")[0]["content"], " /etc/hosts is a file")
        self.leave(terminal)

    def test_save_writes_the_conversation(self):
        terminal = self.chat("--max-new-tokens", "4", "--system", "Be brief.")
        self.turn(terminal, "Grüße, \"you\"")
        self.turn(terminal, "again")
        # A path that cannot be written is said, and the conversation is still there.
        self.turn(terminal, "/save nowhere/all.json", until=r"cannot be written(?s:.)*> ")
        self.turn(terminal, "/save", until=r"needs the name of a file(?s:.)*> ")
        self.assertEqual(self.files(), [])
        self.turn(terminal, "/save my talk.json", until=r"wrote 5 messages(?s:.)*> ")
        saved = self.saved("my talk.json")
        self.assertEqual([message["role"] for message in saved],
                         ["system", "user", "assistant", "user", "assistant"])
        self.assertEqual(saved[0]["content"], "Be brief.")
        self.assertEqual(saved[1]["content"], "Grüße, \"you\"")
        self.assertTrue(all(set(message) == {"role", "content"} for message in saved))
        self.leave(terminal)

    def test_reset_forgets_the_history(self):
        terminal = self.chat("--max-new-tokens", "4", "--system", "Be brief.")
        prompt = [int(re.search(r"(\d+) prompt", self.turn(terminal, "hello")).group(1))]
        prompt.append(int(re.search(r"(\d+) prompt", self.turn(terminal, "hello")).group(1)))
        self.turn(terminal, "/reset", until=r"history is forgotten(?s:.)*> ")
        self.turn(terminal, "/save all.json", until=r"wrote 1 message(?s:.)*> ")
        prompt.append(int(re.search(r"(\d+) prompt", self.turn(terminal, "hello")).group(1)))
        self.assertGreater(prompt[1], prompt[0])
        self.assertEqual(prompt[2], prompt[0])
        self.leave(terminal)

    def test_stats(self):
        terminal = self.chat("--max-new-tokens", "4")
        empty = self.turn(terminal, "/stats", until=r"host store.*\r\n(?s:.)*> ")
        self.assertRegex(empty, r"last answer +none yet")
        self.assertRegex(empty, r"history +0 messages")
        self.turn(terminal, "hello")
        full = self.turn(terminal, "/stats", until=r"host store.*\r\n(?s:.)*> ")
        self.assertRegex(full, r"history +2 messages")
        for pattern in (r"tokens +\d+ prompt \(0 reused\), 4 new", r"share attended +\d",
                        r"device memory +[\d.]+ \w+ in use, [\d.]+ \w+ at most so far, of [\d.]+",
                        r"host store +[\d.]+ \w+ in use, of [\d.]+"):
            self.assertRegex(full, pattern)
        self.leave(terminal)

    def test_stopped_answer_stays_in_the_history(self):
        terminal = self.chat("--ignore-eos", "--max-new-tokens", "30000")
        start = self.at
        terminal.type("hello\n")
        terminal.wait_for(r"hello\r\n(?s:.){150,}", start)
        terminal.type("\x03")
        self.at = terminal.wait_for(r"what came so far stays(?s:.)*> ", start)
        self.turn(terminal, "/save all.json", until=r"wrote 2 messages(?s:.)*> ")
        answer = self.saved("all.json")[1]
        self.assertEqual(answer["role"], "assistant")
        self.assertGreater(len(answer["content"]), 20)
        terminal.type("\x03")  # at the prompt
        self.assertEqual(terminal.end(), 0, terminal.text)

    def test_message_that_was_stopped_before_its_answer_is_forgotten(self):
        terminal = self.chat("--prefill-chunk", "16")
        start = self.at
        terminal.type(self.text[:3000] + "\n")
        terminal.wait_for(r"reading the prompt", start)
        terminal.type("\x03")
        self.at = terminal.wait_for(r"message is forgotten(?s:.)*> ", start)
        self.turn(terminal, "/save all.json", until=r"wrote 0 messages(?s:.)*> ")
        self.assertEqual(self.saved("all.json"), [])
        self.leave(terminal)

    def test_commands_from_a_pipe(self):
        answer = self.succeeds("run", "-m", self.recall, "--chat", "--quiet", "--max-new-tokens",
                               "4", stdin=b"hello\n/save all.json\n/reset\nhello\n")
        self.assertEqual(answer.err, "")
        self.assertEqual(len(self.saved("all.json")), 2)
        first, second = answer.out.splitlines()[:1], answer.out.splitlines()[-1:]
        self.assertEqual(first, second)
