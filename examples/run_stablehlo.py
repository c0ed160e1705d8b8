"""Runs a model of `bert-jax export --to stablehlo`: python run_stablehlo.py DIR "a text" ...

Prints the outputs of an encoder, or the translations of a model that translates.
"""

import json
import sys
from pathlib import Path

import jax.export
import numpy as np
import safetensors.numpy

directory, texts = Path(sys.argv[1]), sys.argv[2:]
weights = safetensors.numpy.load_file(directory / "model.safetensors")


def program(name):
    """Load a program; its first argument is the weights."""
    return jax.jit(jax.export.deserialize(bytearray((directory / name).read_bytes())).call)


def marian():
    """Return the functions from a text to ids, and from ids to a text, of Marian's tokenizer."""
    import sentencepiece

    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(directory / f"{side}.spm"))
        for side in ("source", "target")
    )
    ids = json.loads((directory / "vocab.json").read_text("utf-8"))
    names = {id: token for token, id in ids.items()}

    def encode(text):
        end = text.find("<<") + 2 if text.startswith(">>") else 0  # the code of a language
        code, rest = ([text[:end]], text[end:]) if end > 1 else ([], text)
        tokens = [*code, *source.encode(rest, out_type=str)]
        return [*(ids.get(token, ids["<unk>"]) for token in tokens), ids["</s>"]]

    def decode(row):
        tokens = [names[id] for id in row if names[id] != "</s>"]
        return target.decode_pieces(tokens).replace("▁", " ").strip()

    return encode, decode


def translate(encode, decode):
    """Yield the translation of each text."""
    sizes = json.loads((directory / "programs.json").read_text())["beam.stablehlo"]
    rows, most, search = sizes["rows"], sizes["source_length"], program("beam.stablehlo")
    for first in range(0, len(texts), rows):
        some = texts[first : first + rows]
        ids, mask = np.zeros((2, rows, most), np.int32)
        for number in range(rows):  # the last text fills the rows that are left
            row = encode(some[min(number, len(some) - 1)])
            if len(row) > most:
                sys.exit(f"a text has {len(row)} tokens, but the program takes {most}")
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        limits = np.minimum(3 * mask.sum(1), sizes["target_length"]).astype(np.int32)
        tokens, lengths, _ = search(weights, ids, mask, limits)
        for row, length in zip(tokens[: len(some)].tolist(), lengths.tolist(), strict=False):
            yield decode(row[:length])


if (directory / "source.spm").exists():
    print(*translate(*marian()), sep="\n")
    sys.exit()
import tokenizers  # noqa: E402

tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
if (directory / "programs.json").exists():
    print(*translate(lambda text: tokenizer.encode(text).ids, tokenizer.decode), sep="\n")
    sys.exit()
tokenizer.enable_padding()
found = [(row.ids, row.type_ids, row.attention_mask) for row in tokenizer.encode_batch(texts)]
inputs = np.array(found, np.int32).swapaxes(0, 1)
for name, array in program("model.stablehlo")(weights, *inputs).items():
    print(name, array.shape, *np.asarray(array).ravel()[:8])
