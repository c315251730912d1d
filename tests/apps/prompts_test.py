"""Prompts: what is refused, and what of a text reaches the model."""
import os

from program import Case, document


class Prompts(Case):
    def ask(self, *args, **kwargs):
        """The JSON object of a short greedy answer."""
        return self.succeeds("run", "-m", self.recall, "--json", "--max-new-tokens", "2", *args,
                             **kwargs).json()[0]

    def tokens(self, *args, **kwargs):
        return self.ask(*args, **kwargs)["report"]["prompt_tokens"]

    def refuse(self, names, *args, **kwargs):
        return self.refused(3, names, "run", "-m", self.recall, *args, **kwargs)

    # Too long

    def test_longer_than_the_model(self):
        self.write("text.txt", "one two three four five six seven\n" * 6000)
        self.refuse(["32768", "tokens", "model's limit"], "--file", "text.txt")

    def test_longer_than_context(self):
        self.write("text.txt", document(20))
        self.refuse(["--context", "100"], "--file", "text.txt", "--context", "100")

    def test_context_leaves_room_for_one_token(self):
        count = self.tokens("-p", "hello")
        self.refuse([str(count), "--context"], "-p", "hello", "--context", str(count))
        answer = self.ask("-p", "hello", "--context", str(count + 1))
        self.assertEqual(len(answer["tokens"]), 1)
        self.assertEqual(answer["finish_reason"], "length")

    def test_longer_than_the_host_store(self):
        self.write("text.txt", document(60))
        self.refused(4, ["--host-memory"], "run", "-m", self.recall, "--file", "text.txt",
                     "--host-memory", "2MiB")

    # Nothing to answer

    def test_empty_file(self):
        self.write("empty.txt", "")
        self.refuse(["empty.txt", "is empty"], "--file", "empty.txt")

    def test_file_of_a_byte_order_mark_alone(self):
        self.write("mark.txt", b"\xef\xbb\xbf")
        self.refuse(["mark.txt", "is empty"], "--file", "mark.txt")

    def test_empty_context_file(self):
        self.write("empty.txt", "")
        self.refuse(["empty.txt", "is empty"], "--context-file", "empty.txt", "--question", "Why?")

    def test_empty_standard_input(self):
        self.refuse(["standard input", "is empty"])

    def test_empty_prompt(self):
        self.refused(2, ["--prompt", "empty"], "run", "-m", self.recall, "-p", "")

    # Small ones

    def test_whitespace(self):
        self.assertGreater(self.tokens("-p", " \t\n "), 0)
        self.assertGreater(self.tokens("-p", " \t\n ", "--raw"), 0)

    def test_one_character(self):
        self.assertEqual(self.tokens("-p", "x", "--raw"), 1)

    def test_one_character_outside_ascii(self):
        self.assertGreater(self.tokens("-p", "\U0001f600", "--raw"), 1)

    # Bytes

    def test_not_utf8(self):
        self.write("latin.txt", "first line\nna\u00efve\n".encode("latin-1"))
        self.refuse(["latin.txt", "UTF-8", "offset 13", "line 2"], "--file", "latin.txt")

    def test_not_utf8_on_standard_input(self):
        self.refuse(["standard input", "UTF-8", "offset 2"], stdin=b"ab\xff")

    def test_utf8_cut_in_a_character(self):
        self.write("cut.txt", "caf\u00e9".encode()[:-1])
        self.refuse(["cut.txt", "offset 3"], "--file", "cut.txt")

    def test_utf16(self):
        for name in ("utf-16", "utf-16-le", "utf-16-be"):
            content = "hello".encode(name)
            self.write("wide.txt", content)
            self.refuse(["wide.txt", "UTF-16" if name == "utf-16" else "NUL"], "--file", "wide.txt")

    def test_nul(self):
        self.write("nul.txt", b"hello\0world")
        self.refuse(["nul.txt", "NUL", "offset 5"], "--file", "nul.txt")

    def test_byte_order_mark_is_dropped(self):
        self.write("plain.txt", "hello\nworld")
        self.write("mark.txt", b"\xef\xbb\xbfhello\nworld")
        self.assertEqual(self.tokens("--file", "mark.txt"), self.tokens("--file", "plain.txt"))

    def test_crlf_becomes_lf(self):
        self.write("plain.txt", "hello\n\nworld\n" * 5)
        self.write("crlf.txt", "hello\r\n\r\nworld\r\n" * 5)
        self.assertEqual(self.ask("--file", "crlf.txt")["report"]["prompt_tokens"],
                         self.ask("--file", "plain.txt")["report"]["prompt_tokens"])

    # Paths

    def test_folder(self):
        os.mkdir(self.path("texts"))
        self.refuse(["texts", "folder"], "--file", "texts")
        self.refuse(["texts", "folder"], "--context-file", "texts", "--question", "Why?")

    def test_missing_file(self):
        self.refuse(["nowhere.txt", "No such file"], "--file", "nowhere.txt")

    def test_path_through_a_file(self):
        self.write("text.txt", "hello")
        self.refuse(["text.txt/more", "Not a directory"], "--file", "text.txt/more")

    def test_unreadable_file(self):
        # Readable by nobody, root included: reading this file is always an I/O error.
        self.refuse(["/proc/self/mem", "cannot be read"], "--file", "/proc/self/mem")

    def test_device_that_never_ends(self):
        self.refuse(["/dev/zero", "NUL", "offset 0"], "--file", "/dev/zero")

    def test_standard_input(self):
        given = self.ask("-p", "hello there")
        for args in ([], ["--file", "-"]):
            piped = self.ask(*args, stdin=b"hello there")
            self.assertEqual(piped["tokens"], given["tokens"])

    def test_document_on_standard_input(self):
        answer = self.ask("--context-file", "-", "--question", "Why?", stdin=document(5).encode())
        self.assertGreater(answer["report"]["prompt_tokens"], 50)

    # Characters

    def test_backslash_n_stays_two_characters(self):
        self.write("literal.txt", "a\\nb\\nc\\nd")
        self.write("lines.txt", "a\nb\nc\nd")
        typed = self.ask("-p", "a\\nb\\nc\\nd")
        self.assertEqual(typed["report"]["prompt_tokens"], self.tokens("--file", "literal.txt"))
        self.assertNotEqual(typed["report"]["prompt_tokens"], self.tokens("--file", "lines.txt"))

    def test_prompt_that_begins_with_a_dash(self):
        self.assertEqual(self.tokens("-p", "--help"), self.tokens("--prompt=--help"))

    def test_special_tokens(self):
        # They count as the tokens they spell: 2 instead of the 7 or more of ordinary text.
        special = self.tokens("--raw", "-p", "<|im_start|>user")
        self.assertLess(special, self.tokens("--raw", "-p", "<|im_begin|>user"))
        answer = self.ask("-p", "hello<|im_end|>\n<|im_start|>assistant\nhello")
        self.assertIn(answer["finish_reason"], ("stop", "length"))

    def test_raw_has_no_template(self):
        self.assertLess(self.tokens("--raw", "-p", "hello"), self.tokens("-p", "hello"))

    def test_system_message(self):
        self.assertGreater(self.tokens("-p", "hello", "--system", "Be brief and kind."),
                           self.tokens("-p", "hello"))

    def test_model_without_a_template(self):
        model = self.copy("recall")
        os.remove(os.path.join(model, "tokenizer_config.json"))
        answer = self.succeeds("run", "-m", model, "-p", "hello", "--max-new-tokens", "2")
        self.assertIn("no chat template", answer.figure("prompt"))
        self.refused(3, ["--system", "chat template"], "run", "-m", model, "-p", "hello",
                     "--system", "x")
        self.refused(3, ["--chat", "chat template"], "run", "-m", model, "--chat")
