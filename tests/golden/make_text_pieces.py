#!/usr/bin/env python3
"""Makes tests/golden/text/pieces/: small tokenizers of the SentencePiece kind, with the ids and texts
that Hugging Face tokenizers gives for those in tokenizer.json and that sentencepiece gives for
those in GGUF metadata.

Usage: tests/goldemake_text_pieces.py     needs tokenizers, sentencepiece, protobuf, gguf and numpy
The output depends on nothing but this file, make_text.py, LICENSE and models/recall-7m.
"""
import io
import json
import random

import gguf
import sentencepiece
from make_text import FLAG_CASES, MULTILINGUAL, OUT, ROOT, TORTURE, random_texts
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from tokenizers import (AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

TARGET = OUT / "pieces"
CORPUS = (ROOT / "LICENSE").read_text() + (
    ROOT / "models" / "recall-7m" / "MODEL_CARD.md").read_text() + MULTILINGUAL * 8
SPACE = "\u2581"
BYTES = [f"<0x{b:02X}>" for b in range(256)]
ENDS = ["<unk>", "<s>", "</s>"]
TEXTS = [
    " leading", "  two leading", "trailing ", "a  b   c    d", "   ", "\n", "\n\nabove", " \n ",
    "<s>Hello", "<s> Hello", "Hello</s>", "Hello </s> world", "<s><s>", "a<s>b<s> c", "<unk> x",
    "<tool>x", "x <tool> y", "x<tool>  y<tool>", "  <tool>", "[INST] hi [/INST] yes </s>",
    "<0x41>", "x<0x0A>y", "\u2581", "a\u2581b \u2581c", "\u2581\u2581x", "\u3042\u3044 \u3042",
    "\U0001F600\U0001F600 \U0001F600", "q\u0307\u0323", "\u00e9\u00e8x\u00e9", "\U0010FFFF\u0001",
    "the the  the\tthe", "abcabcdabcde abcd", "aaaaaaaaaaaaaaa aaaa", "licenselicense License",
    "w\u00fcrde W\u00fcrde", "z zz zzz" * 3,
]


def train_library(byte_fallback):
    """A BPE model of the library; characters beyond the 70 most frequent have no token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    first = ENDS + (BYTES if byte_fallback else [])
    tokenizer.train_from_iterator(
        CORPUS.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=len(first) + 330, limit_alphabet=70, show_progress=False,
                            special_tokens=first))
    tree = json.loads(tokenizer.to_str())
    # Only the ends are tokens that are looked for in the text.
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] in ENDS]
    tree["model"].update(byte_fallback=byte_fallback, fuse_unk=True, unk_token="<unk>")
    return tree


def finish(tree, normalizer, pre_tokenizer, strip=True, added=()):
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()] +
        ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def library_tokenizers():
    metaspace = pre_tokenizers.Metaspace
    prepended = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made = {}
    # As Llama 2 has it.
    made["prepend"] = finish(train_library(True), prepended, None,
                             added=[AddedToken("<tool>", normalized=False)])
    # The same with tokens that are looked for in the normalised text.
    tree = train_library(True)
    for token in tree["added_tokens"]:
        token["normalized"] = True
    made["normalized"] = finish(tree, prepended, None, added=[
        AddedToken("<tool>", normalized=True), AddedToken("a b", normalized=True)])
    # The newer form, with words that no merge reaches.
    tree = train_library(True)
    for offset, word in enumerate(["Hello", SPACE + "leading", "\u3042\u3044"]):
        tree["model"]["vocab"][word] = len(tree["model"]["vocab"])
    tree["model"]["ignore_merges"] = True
    made["first"] = finish(tree, None, metaspace(SPACE, prepend_scheme="first", split=False),
                           added=[AddedToken("<tool>", rstrip=True, normalized=False)])
    # Characters without a token are unknown, a run of them once; words apart.
    made["always"] = finish(train_library(False), normalizers.NFC(),
                            metaspace(SPACE, prepend_scheme="always", split=True))
    # Every unknown character by itself; no space is added, so none is taken away.
    tree = train_library(False)
    tree["model"]["fuse_unk"] = False
    made["never"] = finish(tree, None, metaspace(SPACE, prepend_scheme="never", split=False),
                           strip=False, added=[AddedToken("<tool>", lstrip=True, normalized=False)])
    # Without an unknown token such characters are dropped.
    tree = train_library(False)
    tree["model"]["unk_token"] = None
    made["dropped"] = finish(tree, None, metaspace(SPACE, prepend_scheme="first", split=True))
    return made


def mixes(run):
    """Whether bytes spell characters and something broken: the library then replaces all of them,
    sentencepiece and CLO the broken ones."""
    try:
        bytes(run).decode()
        return False
    except UnicodeDecodeError:
        return bytes(run).decode(errors="ignore") != ""


def random_ids(rng, spellings, exclude):
    """Sequences of ids, half of them mostly of bytes."""
    ids = [i for i in spellings if spellings[i] not in exclude]
    byte_ids = [i for i in ids if spellings[i] in BYTES] or ids
    for round_ in range(90):
        yield [rng.choice(byte_ids if round_ % 2 and rng.random() < 0.8 else ids)
               for _ in range(rng.randint(1, 8))]


def runs_of(ids, spellings):
    run = []
    for i in ids:
        if spellings[i] in BYTES:
            run.append(BYTES.index(spellings[i]))
        elif spellings[i] not in ENDS:  # those are skipped
            yield run
            run = []
    yield run


def content_decoder(tokenizer):
    """Decodes added tokens as their content, and skips the special ones. The library does so too,
    but takes the normalised content where a token is looked for in the normalised text, and then
    skips none: a deliberate difference."""
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["normalized"] = False
    return Tokenizer.from_str(json.dumps(tree))


def library_cases(tokenizer, texts, rng):
    decoder = content_decoder(tokenizer)
    plain = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    tokenizer.encode_special_tokens = True
    literal = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    tokenizer.encode_special_tokens = False
    spellings = {i: s for s, i in tokenizer.get_vocab().items()}
    sequences = [ids for ids in random_ids(rng, spellings, [])
                 if not any(mixes(run) for run in runs_of(ids, spellings))]
    return {
        "ids": plain,
        "literal": {str(i): b for i, (a, b) in enumerate(zip(plain, literal)) if a != b},
        "decoded": [decoder.decode(ids) for ids in plain],
        "hello": tokenizer.encode("Hello", add_special_tokens=True).ids,
        "sequences": [[ids, decoder.decode(ids)] for ids in sequences],
    }


def train_sentencepiece(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, model_type="bpe",
        normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
        minloglevel=2, **options)
    proto = sentencepiece_model.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto


def sentencepiece_models():
    types = sentencepiece_model.ModelProto.SentencePiece
    made = {}
    # As Llama 2 and Mistral have it; "\u00fc" only as a part of other pieces.
    proto = train_sentencepiece(vocab_size=640, byte_fallback=True, character_coverage=0.985,
                                split_digits=True, allow_whitespace_only_pieces=True,
                                control_symbols=["[INST]", "[/INST]"])
    proto.pieces.add(piece="W\u00fcr", score=-5.5, type=types.NORMAL)
    proto.pieces.add(piece="r\u00fcb\u00e4", score=-5.5, type=types.NORMAL)
    proto.pieces.add(piece="\u3042\u3044", score=-1.5, type=types.NORMAL)
    made["llama"] = proto
    # No byte tokens, no space in front, pieces that are not used, and equal scores everywhere.
    proto = train_sentencepiece(vocab_size=380, byte_fallback=False, character_coverage=0.985,
                                add_dummy_prefix=False, control_symbols=["[INST]"],
                                user_defined_symbols=["<tool>", "abc", "abcd", SPACE * 3])
    number = 0
    for piece in proto.pieces:
        if piece.type != types.NORMAL:
            continue
        number += 1
        piece.score = float(piece.score // 8)
        if len(piece.piece) > 1 and number % 5 == 0:
            piece.type = types.UNUSED
    made["ties"] = proto
    return made


def write_gguf(path, proto):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece.encode() for p in proto.pieces])
    writer.add_token_scores([p.score for p in proto.pieces])
    writer.add_token_types([p.type for p in proto.pieces])
    ids = {p.piece: i for i, p in enumerate(proto.pieces)}
    writer.add_unk_token_id(ids["<unk>"])
    writer.add_bos_token_id(ids["<s>"])
    writer.add_eos_token_id(ids["</s>"])
    if not proto.normalizer_spec.add_dummy_prefix:
        writer.add_add_space_prefix(False)
        writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def sentencepiece_cases(proto, texts, rng):
    model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    spellings = {i: p.piece for i, p in enumerate(proto.pieces)}
    ids = [model.encode(t) for t in texts]
    # The unknown token has a text of its own there. A space spelled as a byte is not taken away.
    sequences = list(random_ids(rng, spellings, ["<unk>", "<0x20>"]))
    return {"ids": ids,
            "decoded": [model.decode(i) if 0 not in i else None for i in ids],
            "sequences": [[s, model.decode(s)] for s in sequences]}


def main():
    TARGET.mkdir(parents=True, exist_ok=True)
    rng = random.Random(31)
    texts = TORTURE + FLAG_CASES + TEXTS + random_texts(rng, 60)
    library = {}
    for name, tokenizer in library_tokenizers().items():
        tree = json.loads(tokenizer.to_str())
        (TARGET / f"{name}.json").write_text(
            json.dumps(tree, ensure_ascii=False, separators=(",", ":")))
        library[name] = library_cases(tokenizer, texts, rng)
    scored = {}
    for name, proto in sentencepiece_models().items():
        write_gguf(TARGET / f"{name}.gguf", proto)
        scored[name] = sentencepiece_cases(proto, texts, rng)
    (TARGET / "cases.json").write_text(
        json.dumps({"texts": texts, "library": library, "sentencepiece": scored},
                   ensure_ascii=False, separators=(",", ":")))
    sizes = {p.name: p.stat().st_size for p in sorted(TARGET.iterdir())}
    print(json.dumps(sizes, indent=1), sum(sizes.values()), "bytes")


if __name__ == "__main__":
    main()
