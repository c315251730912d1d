#!/usr/bin/env python3
"""Makes tests/golden/text/: small tokenizers with the ids that Hugging Face tokenizers gives, and
chat templates with the text that jinja2 gives.

Usage: tests/golden/make_text.py        needs the packages tokenizers and jinja2
The output depends on nothing but this file, LICENSE and models/recall-7m.
"""
import json
import pathlib
import random

import make_text_templates
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "tests" / "golden" / "text"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = (r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = CONTRACTIONS + WORDS % r"\p{N}{1,3}"
QWEN2 = CONTRACTIONS + WORDS % r"\p{N}"

MULTILINGUAL = """
Die Würde des Menschen ist unantastbar. L'été, les élèves français étudient; où êtes-vous?
Съешь же ещё этих мягких французских булок, да выпей чаю. Η γρήγορη καφέ αλεπού πηδάει.
いろはにほへと ちりぬるを。 我能吞下玻璃而不伤身体。 나는 유리를 먹을 수 있어요.
שלום עולם, זה טקסט מימין לשמאל. مرحبا بالعالم، هذا نص عربي ١٢٣٤. ทดสอบภาษาไทย क्षत्रिय हिन्दी
def f(x):\n\treturn {'a': [x ** 2 for _ in range(10)]}\n    if (a != b && c <= d) { return 0x1F; }
"""

TORTURE = [
    "",
    " ",
    "Hello, world!",
    "I'm sure they'll say it's what we've done; you'd THINK SO, WOULDN'T YOU? IT'S I'LL",
    "0 1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ ½ Ⅷ ²³ 1st 0x1F",
    "  two  spaces   three    four     five      \ttab\t\ttabs \t mixed \t ",
    "line\nline\r\nline\r\r\n\n\n  \n\t\n end\n",
    "trailing newline\n\n\n",
    "    indented code():\n        return x  # comment\n",
    "for (int i=0;i<10;++i){a[i]+=b[i]*c;}//done\n\n#include <vector>\n",
    "日本語のテキストと漢字、カタカナ。中文文本没有空格。한국어 텍스트",
    "emoji 😀😃 👨‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☃ end",
    "combining e\u0301 a\u0308 n\u0303 Z\u0351\u036b\u0343 vs é ä ñ",
    "Hangul \u1112\u1161\u11ab vs \ud55c, Å \u212b, ﬁ ligature, \u2126",
    "שלום עולם مرحبا بالعالم mixed עברית 123",
    "no\u00a0break thin\u2009space ideographic\u3000space nel\u0085x ls\u2028ps\u2029x ogham\u1680x "
    "mongolian\u180evs zwsp\u200bx bom\ufeffx",
    "control \x00\x01\x1b[0m \x7f end",
    "'s 'S 'ſ 't'T 're'RE 'll don't DON'T ''' '' 'x",
    "<|endoftext|>text<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|> <|im_start|><|im_end|> <|im_end| > <|im_",
    "a<|begin|>b <|begin|> c\n<|begin|>",
    "_under_score_ __init__ snake_case CamelCase ALLCAPS mixedCASE123abc",
    "https://example.org/path?q=1&r=%20#frag user@host.tld C:\\dir\\file",
    "$€£¥ ±×÷ «quotes» “curly” ‘single’ – — … • ™ © ½",
    "ßẞſ İıŉ ǅ ﬀ K Å 𝒜𝓑 𐐀𐐨 \U0001e900 \U00020000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!!!!!!!???????.......,,,,,,-----_____=====+++++*****/////\\\\\\\\\\",
    "word \n word \n\n word\t\nword \r\n word",
    "x \u0301y \u200d z \u20e3",
]
FLAG_CASES = [
    "foo word bar", "sword word wordy word", "word", "_word word_ 1word word1 éword wordé (word)",
    "a  <l>  b", "<l><l> <l>", "a <r>  \n b", "<r> <l> <r>   <l>", "  <lr>  x <lr><lr>",
    "caf\u00e9 cafe\u0301 x", "e\u0301<l>e\u0301", "abcabcd abcde", "<b><b> text <b",
    "\u00a0<l>\u3000<r>\u2003x", "<l>word<r>word", "word\u200dword", "\u24b6word word\u24b6",
]


def add_all(tokenizer, tokens):
    tokenizer.add_special_tokens([t for t in tokens if t.special])
    tokenizer.add_tokens([t for t in tokens if not t.special])


def train(pattern, size, normalizer=None, specials=(), prefix_space=False, digits=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    first = []
    if digits:
        first.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        first.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(first + [last]) if first else last
    tokenizer.decoder = decoders.ByteLevel()
    text = (ROOT / "LICENSE").read_text() + (
        ROOT / "models" / "recall-7m" / "MODEL_CARD.md").read_text() + MULTILINGUAL * 8
    tokenizer.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=list(specials),
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def patched(tokenizer, change):
    """The tokenizer after an edit of its JSON, for what the Python interface cannot set."""
    tree = json.loads(tokenizer.to_str())
    change(tree)
    return Tokenizer.from_str(json.dumps(tree))


def old_merges(tree):
    tree["model"]["merges"] = [" ".join(m) for m in tree["model"]["merges"]]


def make_tokenizers():
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = {}
    made["gpt2"] = patched(train(None, 640, specials=["<|endoftext|>"]), old_merges)
    made["gpt2"].post_processor = processors.ByteLevel(trim_offsets=False)

    llama = train(LLAMA3, 720)

    def llama_like(tree):
        # Words that no merge reaches: only ignore_merges finds them.
        vocab = tree["model"]["vocab"]
        first = len(vocab)
        for offset, word in enumerate(["wouldn", "Ġidiosyncratic", "日本語のテキストと漢字"]):
            spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False
                                               ).pre_tokenize_str(word.replace("Ġ", " "))[0][0]
            vocab[spelled] = first + offset
        tree["model"]["ignore_merges"] = True
    llama = patched(llama, llama_like)
    add_all(llama, [AddedToken(t, special=True, normalized=False)
                    for t in ["<|begin|>", "<|end|>", "<|im_start|>"]])
    begin = llama.token_to_id("<|begin|>")
    llama.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin|> $A",
                                      special_tokens=[("<|begin|>", begin)])])
    made["llama3"] = llama

    made["qwen2"] = train(QWEN2, 700, normalizer=normalizers.NFC(), specials=chat)

    # Every flag of added tokens, a prefix space, digits apart, BOS and EOS.
    flags = train(None, 480, normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.NFC()]),
                  prefix_space=True, digits=True)
    add_all(flags, [
        AddedToken("<b>", special=True, normalized=False),
        AddedToken("word", single_word=True, special=False, normalized=False),
        AddedToken("<l>", lstrip=True, special=True, normalized=False),
        AddedToken("<r>", rstrip=True, special=False, normalized=False),
        AddedToken("<lr>", lstrip=True, rstrip=True, special=False, normalized=True),
        AddedToken("caf\u00e9", special=False, normalized=True),
        AddedToken("abc", special=False, normalized=False),
        AddedToken("abcd", special=False, normalized=False),
    ])
    flags.post_processor = processors.TemplateProcessing(
        single="<b> $A <l>", special_tokens=[("<b>", flags.token_to_id("<b>")),
                                             ("<l>", flags.token_to_id("<l>"))])
    made["flags"] = flags
    return made


def decode(tokenizer, ids):
    """What tokenizers decodes, but for one deliberate difference: its ByteLevel decoder takes the
    "é" of an added token for the spelling of byte 0xE9; here added tokens are their content."""
    return tokenizer.decode(ids).replace("caf\ufffd", "caf\u00e9")


def random_texts(rng, count):
    pieces = (["<|im_start|>", "<|im_end|>", "<|begin|>", "<|endoftext|>", "'s", "'LL", "\r\n",
               "\n", "\n\n", "  ", "\t", " ", " ", "\u00a0", "\u3000", "\u200d", "12", "7", "½"]
              + "the of licence work distributed Copyright you Würde élèves булок".split()
              + list("aeéAZzßж漢字ひカ한אبक्ษ.,;:!?-_()[]{}<>|/\\'\"#$%&*+=~^`@😀🏽\u0301\u0308"))
    return ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 24))) for _ in range(count)]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    made = make_tokenizers()
    for name, tokenizer in made.items():
        (OUT / f"tokenizer_{name}.json").write_text(
            json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")))
    made["recall-7m"] = Tokenizer.from_file(str(ROOT / "models" / "recall-7m" / "tokenizer.json"))

    rng = random.Random(20)
    texts = TORTURE + FLAG_CASES + random_texts(rng, 60)
    cases = {"texts": texts, "tokenizers": {}}
    for name, tokenizer in made.items():
        plain = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        tokenizer.encode_special_tokens = True
        literal = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        tokenizer.encode_special_tokens = False
        cases["tokenizers"][name] = {
            "ids": plain,
            # Only where special tokens that stay text make a difference: index -> ids.
            "literal": {str(i): b for i, (a, b) in enumerate(zip(plain, literal)) if a != b},
            "hello": tokenizer.encode("Hello", add_special_tokens=True).ids,
            "vocab_size": max(tokenizer.get_vocab().values()) + 1,
            "decoded": {str(i): decode(tokenizer, ids) for i, ids in enumerate(plain)
                        if decode(tokenizer, ids) != texts[i]},
        }
    (OUT / "token_cases.json").write_text(
        json.dumps(cases, ensure_ascii=False, separators=(",", ":")))
    make_text_templates.write(OUT)
    sizes = {p.name: p.stat().st_size for p in sorted(OUT.iterdir())}
    print(json.dumps(sizes, indent=1), sum(sizes.values()), "bytes")


if __name__ == "__main__":
    main()
