"""Runs a model of `bert-jax export --to stablehlo`: python run_stablehlo.py DIR "a text" ..."""

import sys
from pathlib import Path

import jax.export
import numpy as np
import safetensors.numpy
import tokenizers

directory, texts = Path(sys.argv[1]), sys.argv[2:]
tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
tokenizer.enable_padding()
rows = [(row.ids, row.type_ids, row.attention_mask) for row in tokenizer.encode_batch(texts)]
inputs = np.array(rows, np.int32).swapaxes(0, 1)
model = jax.export.deserialize(bytearray((directory / "model.stablehlo").read_bytes()))
weights = safetensors.numpy.load_file(directory / "model.safetensors")
for name, array in jax.jit(model.call)(weights, *inputs).items():
    print(name, array.shape, *np.asarray(array).ravel()[:8])
