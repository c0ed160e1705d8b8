"""What `encode` and `encode_batch` promise of every text and tokenizer."""

from dataclasses import astuple

import numpy as np

from bert_jax.tokenization.tokenizer import Encoding, Tokenizer


def checked_encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    """The encoding of `text`, after checks of dtypes, offsets, special ids and the batched form."""
    ids, offsets = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert offsets.dtype == np.int32
    assert offsets.shape == (len(ids), 2)
    (batched,) = tokenizer.encode_batch([text])
    assert batched.dtype == np.int32
    np.testing.assert_array_equal(batched, ids)
    starts, ends = offsets[:, 0], offsets[:, 1]
    assert (starts >= 0).all()
    assert (starts <= ends).all()
    assert (ends <= len(text)).all()
    assert (np.diff(starts) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    special = tokenizer.special_ids
    assert not set(ids.tolist()) & set(astuple(special)) - {special.unk}
    return Encoding(ids, offsets)
