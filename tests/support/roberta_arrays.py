"""Arrays of a small BERT under the names of Hugging Face, and the same as a RoBERTa."""

import numpy as np
from bert_names import to_huggingface
from huggingface_directory import MODEL, pretraining_params

from bert_jax.artefacts.formats.model_config import config_to_huggingface

WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
MLM = "cls.predictions."
PAD = 1


def bert_arrays():
    return to_huggingface(pretraining_params(), MODEL)


def bert_config(**changes):
    return config_to_huggingface("bert", MODEL) | changes


def roberta(kind="roberta", made_by="RobertaForMaskedLM"):
    """The BERT as a RoBERTa: two more positions, one type, other names."""
    arrays = bert_arrays()
    positions = arrays[POSITIONS]
    arrays[POSITIONS] = np.concatenate([np.full((PAD + 1, positions.shape[1]), 7.0), positions])
    arrays[TYPES] = arrays[TYPES][:1]
    renamed = {}
    for name, array in arrays.items():
        if name.startswith("bert."):
            renamed[name.replace("bert.", "roberta.", 1)] = array.astype(np.float32)
        elif name.startswith(MLM):
            new = name.replace(f"{MLM}transform.LayerNorm", "lm_head.layer_norm")
            new = new.replace(f"{MLM}transform.dense", "lm_head.dense")
            renamed[new.replace(f"{MLM}bias", "lm_head.bias")] = array
    config = bert_config(
        model_type=kind, architectures=[made_by], type_vocab_size=1, pad_token_id=PAD,
        max_position_embeddings=MODEL.num_positions + PAD + 1,
    )  # fmt: skip
    return config, renamed
