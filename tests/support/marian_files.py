"""Files of a tiny Marian, as opus-mt publishes them: two models, one map, random weights."""

import dataclasses
import io
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import sentencepiece
from translators import translator

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.tokenization.load import load_tokenizer

_WHO = ("the dog", "a cat", "two men", "the old river", "her green house", "some children", "we")
_DOES = ("sees", "takes", "finds", "paints", "knows", "hears")
_WHEN = ("today", "slowly", "again", "in Köln", "near the sea", "at 7:45", "— or not")
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 32,
         "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "max_position_embeddings": 48}  # fmt: skip


def sentences(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sources, and targets in which each word is written backwards."""
    random = np.random.default_rng(seed)
    parts = (_WHO, _DOES, _WHO, _WHEN)
    sources = [" ".join(random.choice(part) for part in parts) + "." for _ in range(count)]
    return sources, [" ".join(word[::-1] for word in source.split()) for source in sources]


@lru_cache
def tokenizer_files() -> dict[str, bytes]:
    """The map begins with </s> and <unk>, and ends with the padding token, as in opus-mt."""
    files, pieces = {}, dict[str, None]()
    for name, texts in zip(("source.spm", "target.spm"), sentences(300), strict=True):
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=out, vocab_size=90, minloglevel=2,
            hard_vocab_limit=False, num_threads=1,
        )  # fmt: skip
        files[name] = out.getvalue()
        model = sentencepiece.SentencePieceProcessor(model_proto=files[name])
        pieces |= dict.fromkeys(map(model.id_to_piece, range(3, model.get_piece_size())))
    tokens = ["</s>", "<unk>", *pieces, ">>deu<<", "<pad>"]
    vocab = {token: id for id, token in enumerate(tokens)}
    return {**files, "vocab.json": json.dumps(vocab, indent=2).encode()}


def write_tokenizer(directory: Path) -> Path:
    """Write the files of the tokenizer to a new directory."""
    directory.mkdir()
    for name, content in tokenizer_files().items():
        (directory / name).write_bytes(content)
    config = {"source_lang": "en", "target_lang": "de", "model_max_length": 48}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def random_marian(directory: Path) -> SavedModel:
    """A model of random numbers, with the tokenizer of a new directory."""
    tokenizer = load_tokenizer(write_tokenizer(directory))
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_dim=16, num_heads=2, mlp_dim=32, num_layers=2,
        num_positions=48, dtype="float32", positions="sinusoidal", scale_embeddings=True,
        norm_eps=1e-5, embedding_norm=False, num_types=0, head_transform=False, activation="silu",
    )  # fmt: skip
    return dataclasses.replace(
        translator(TransformerNetwork(model, 1), tokenizer), tokenizer_files=directory
    )


def write_theirs(directory: Path) -> Path:
    """Write a MarianMTModel of random numbers with the settings of opus-mt."""
    import torch
    import transformers

    write_tokenizer(directory)
    size = len(json.loads(tokenizer_files()["vocab.json"]))
    config = transformers.MarianConfig(
        vocab_size=size, **SIZES, activation_function="swish", scale_embedding=True,
        pad_token_id=size - 1, decoder_start_token_id=size - 1, eos_token_id=0, bos_token_id=0,
        forced_eos_token_id=0, init_std=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] += 3  # most translations end
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.add_(0.5 * torch.randn_like(tensor))
    settings = model.generation_config
    settings.num_beams, settings.max_length, settings.bad_words_ids = 4, 48, [[size - 1]]
    model.save_pretrained(directory)
    return directory
