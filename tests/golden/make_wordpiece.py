# ruff: noqa: RUF001 (the inputs are in many scripts)
"""Write tests/golden/tokenizer/wordpiece.json: BERT's tokens for multilingual text.

    python tests/golden/make_wordpiece.py --vocab-dir DIR [--sweep]

DIR holds <name>/vocab.txt for the published vocabularies named below; they are not copied, only the
tokens of the inputs are. The expected tokens come from the plain Python below, written from the
description of the algorithm (Devlin et al. 2018; google-research/bert) and of no library.
`--sweep` also compares every code point with `tokenizers` and prints where the two differ.
"""

import argparse
import hashlib
import json
import unicodedata
from pathlib import Path

OUT = Path(__file__).parent / "tokenizer" / "wordpiece.json"
PUBLISHED = {
    "bert-base-uncased": True,
    "bert-base-cased": False,
    "bert-base-multilingual-uncased": True,
    "bert-base-multilingual-cased": False,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CJK = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip

INPUTS = [
    "",
    " \t\r\n ",
    "The quick brown fox jumps over the lazy dog.",
    "UNAFFABLE Unaffable unaffable",
    "don't can't it's 'quoted' \"double\" -- hyphen-ated e-mail@example.com http://a.b/c?d=e&f#g",
    "1,234.56 $99 50% 3^2 x_y `code` ~ <S> <T> a|b {c} [d] \\ / + =",
    "The text says [MASK] and [CLS] or [SEP], [PAD], [UNK], [unused1] and ##ing.",
    "Crème brûlée, naïve façade, Ångström, São Paulo, Dvořák, Łódź, smörgåsbord",
    "Cre\u0300me bru\u0302le\u0301e decomposed, A\u030angstro\u0308m, Z\u0361z\u0335",
    "İstanbul'da ışık ve ılık IŞIK ısırgan İĞNE",
    "Straße STRASSE ẞ ﬁne oﬃce ﬀ Ǆ ǅ ǆ",
    "Привет, мир! Ёлка ёлка Й й Україна їжак",
    "Ελληνικά: καλημέρα κόσμε, ᾳ ᾴ ὐ",
    "שלום עולם בְּרֵאשִׁית",
    "العربية: مرحبا بالعالم، كِتَابٌ ؟ ـــ لا إله",
    "हिन्दी में नमस्ते दुनिया। क्षत्रिय १२३",
    "ภาษาไทย สวัสดีชาวโลก เก้า",
    "한국어: 안녕하세요 세계! 각각 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "日本語：こんにちは、世界。カタカナ ﾊﾝｶｸ が か\u3099 々〆",
    "中文：你好，世界！「引號」《書名》繁體 简体 㐀 𠀀 豈 𪛖",
    "混合mixed中文and英文123数字",
    "ＦＵＬＬ　ｗｉｄｔｈ，１２３！",
    "emoji 🎉 👍🏽 👩\u200d👩\u200d👧 ❤\ufe0f 🇩🇪 end",
    "zero\u200bwidth joi\u200dner non\u200cjoiner word\u2060joiner bom\ufeff left\u200eright\u200f",
    "soft\u00adhyphen non\u2011breaking hyphen en–dash em—dash …",
    "nul\x00inside bell\x07 esc\x1b[0m del\x7f c1\x85next \x1funit v\x0btab f\x0cfeed",
    "replacement \ufffd character\ufffdinside",
    "tabs\tand\nnew\r\nlines\u2028line\u2029para\u00a0nbsp\u2003em\u3000ideographic\u202fthin",
    "combining\u0301 marks \u0301alone a\u0300\u0316\u20dd e\u0308\u0304",
    "x" * 100,
    "x" * 101 + " after",
    "é" * 100 + " e\u0301" + " " + "e\u0301" * 100,
    "word" * 60 + "!" + "a" * 99,
    "H₂O x² ½ № ™ © ® € £ ¥ µ Ω Å ° ± × ÷",
    "“smart” ‘quotes’ «guillemets» ¿qué? ¡sí! · • † ‡ § ¶",
    "ǅungla Đorđe Œuvre œuvre Æsir þorn Þ ð Ð ø Ø ı",
    "Tiếng Việt: Đất nước, ơ ư Ự ằ",
    "தமிழ் বাংলা ગુજરાતી తెలుగు ಕನ್ನಡ മലയാളം සිංහල မြန်မာ ខ្មែរ",
    "ქართული Հայերեն አማርኛ ᠮᠣᠩᠭᠣᠯ ᏣᎳᎩ ꮳꮃꭹ",
    "𝐁𝐨𝐥𝐝 𝓼𝓬𝓻𝓲𝓹𝓽 𐐀𐐨 𝟙𝟚",
]

DEVIATIONS = [
    # text, lowercase, what `tokenizers` gives, why
    ("ΟΔΟΣ", True, ["οδοσ"], "final sigma: letters are lower-cased one by one"),
    ("a\ue000b", False, ["ab"], "private use is dropped as if it were a control character"),
    ("x\U0002b820y", False, ["x\U0002b820y"], "256 ideographs of extension E are not set apart"),
    ("x\u2e43y", False, ["x\u2e43y"], "punctuation newer than Unicode 8 does not split"),
    ("x\u166dy", False, ["x", "\u166d", "y"], "punctuation in Unicode 8, no longer in 12"),
    ("x\u08d3y", True, ["x\u08d3y"], "marks newer than Unicode 8 are not stripped"),
    ("y" * 101, False, ["[UNK]"], "words over 100 characters; the original's last version has 200"),
]


def is_punctuation(char: str) -> bool:
    ascii_symbol = "!" <= char <= "~" and not char.isalnum()
    return ascii_symbol or unicodedata.category(char).startswith("P")


def basic_words(text: str, lowercase: bool) -> list[str]:
    """Clean, set ideographs apart, lower-case and strip accents, split off punctuation."""
    cleaned = []
    for char in text:
        category = unicodedata.category(char)
        if char in " \t\n\r" or category == "Zs":
            cleaned.append(" ")
        elif char in "\0\ufffd" or category in ("Cc", "Cf"):
            continue
        elif any(low <= ord(char) <= high for low, high in CJK):
            cleaned.append(f" {char} ")
        else:
            cleaned.append(char)
    words = []
    for word in "".join(cleaned).split():
        if lowercase:
            apart = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in apart if unicodedata.category(c) != "Mn")
        spaced = "".join(f" {c} " if is_punctuation(c) else c for c in word)
        words += spaced.split()
    return words


def pieces(word: str, vocab: set[str] | dict[str, int], limit: int) -> list[str]:
    """Longest match first; the whole word is unknown if a part is."""
    if len(word) > limit:
        return ["[UNK]"]
    found: list[str] = []
    while word:
        prefix = "##" if found else ""
        size = next((n for n in range(len(word), 0, -1) if prefix + word[:n] in vocab), 0)
        if not size:
            return ["[UNK]"]
        found.append(prefix + word[:size])
        word = word[size:]
    return found


def reference(
    text: str, vocab: set[str] | dict[str, int], lowercase: bool, limit: int = 100
) -> list[str]:
    return [p for word in basic_words(text, lowercase) for p in pieces(word, vocab, limit)]


def small_vocab(lowercase: bool) -> list[str]:
    """Pieces that cover most of the inputs in several ways and leave every seventh word unknown."""
    words = sorted({w for text in INPUTS for w in basic_words(text, lowercase) if len(w) < 40})
    found = set()
    for i, word in enumerate(words):
        if i % 7 == 0 and len(word) > 1:
            continue
        found.add(word[:1])
        found.update("##" + char for char in word[1:])
        if i % 2:
            found.add(word[: 2 + i % 3])
            found.add("##" + word[3 : 5 + i % 4] if len(word) > 3 else word)
    return SPECIAL + sorted(found)


def encode_all(vocab: list[str], lowercase: bool) -> list[str]:
    known = set(vocab)
    return [" ".join(reference(text, known, lowercase)) for text in INPUTS]


def sweep() -> None:
    """Print the code points where `tokenizers` departs from the reference, between two letters."""
    from tokenizers import normalizers, pre_tokenizers

    split = pre_tokenizers.BertPreTokenizer()
    for lowercase in (False, True):
        clean = normalizers.BertNormalizer(lowercase=lowercase)
        differ: dict[str, list[int]] = {}
        for code in range(0x110000):
            if 0xD800 <= code < 0xE000:
                continue
            text = f"x{chr(code)}y"
            theirs = [w for w, _ in split.pre_tokenize_str(clean.normalize_str(text))]
            if theirs != basic_words(text, lowercase):
                differ.setdefault(unicodedata.category(chr(code)), []).append(code)
        print("lowercase" if lowercase else "cased", {k: len(v) for k, v in differ.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-dir", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    small = {}
    for name, lowercase in (("cased", False), ("uncased", True)):
        vocab = small_vocab(lowercase)
        small[name] = {"vocab": vocab, "tokens": encode_all(vocab, lowercase)}
    published = {}
    for name, lowercase in PUBLISHED.items():
        raw = (args.vocab_dir / name / "vocab.txt").read_bytes()
        vocab = raw.decode().removesuffix("\n").split("\n")
        published[name] = {
            "vocab_sha256": hashlib.sha256(raw).hexdigest(),
            "tokens": encode_all(vocab, lowercase),
        }
    deviations = [
        {
            "text": text,
            "lowercase": lowercase,
            "reference": basic_words(text, lowercase),
            "ours": ours,
            "why": why,
        }
        for text, lowercase, ours, why in DEVIATIONS
    ]
    content = {
        "unicode": unicodedata.unidata_version,
        "inputs": INPUTS,
        "small": small,
        "published": published,
        "deviations": deviations,
    }
    OUT.write_text(json.dumps(content, ensure_ascii=True, indent=0) + "\n", encoding="ascii")
    print(OUT, OUT.stat().st_size)
    if args.sweep:
        sweep()


if __name__ == "__main__":
    main()
