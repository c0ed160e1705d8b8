"""Small random models of every family, as Transformers saves them; needs torch and transformers."""

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Pack my box with five dozen liquor jugs; the jugs are heavy.",
    "Äpfel und 漢字 don't you're it's",
] * 5
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = ["the", "cat", "sat", "on", "##s", "mat", ",", "d", "##og", ".", "paris", "a", "##a"]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 140,
}  # fmt: skip


def byte_level_bpe() -> Any:
    """RoBERTa's tokenizer with a vocabulary of our texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import RobertaTokenizer

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(made.to_str())["model"]
    return RobertaTokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])


def unigram(kind: str = "XLMRobertaTokenizer") -> Any:
    """XLM-R's tokenizer with a vocabulary of our texts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        ),
    )
    vocab = [tuple(pair) for pair in json.loads(made.to_str())["model"]["vocab"]]
    return getattr(transformers, kind)(vocab=vocab)


def wordpiece(kind: str) -> Any:
    """BERT's tokenizer, under the name of a family that has the same."""
    import transformers

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return getattr(transformers, kind)(vocab={token: id for id, token in enumerate(vocab)})


TOKENIZERS = {
    "Bert": lambda: wordpiece("BertTokenizer"),
    "Electra": lambda: wordpiece("BertTokenizer"),
    "DistilBert": lambda: wordpiece("BertTokenizer"),
    "Albert": lambda: wordpiece("BertTokenizer"),
    "Roberta": byte_level_bpe,
    "XLMRoberta": unigram,
    "Camembert": lambda: unigram("CamembertTokenizer"),
}


def save_family(directory: Path, family: str, task: str, **fields: Any) -> Any:
    """A random model of a class, with its tokenizer; returns the model.

    Args:
        directory: A new one.
        family: Bert, Roberta, XLMRoberta, Camembert, Electra, DistilBert or Albert.
        task: The rest of the class's name.
        **fields: Of its configuration.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = TOKENIZERS[family]()
    sizes = dict(SIZES)
    if family == "DistilBert":
        names = {
            "hidden_size": "dim", "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim",
        }  # fmt: skip
        sizes = {names.get(name, name): value for name, value in SIZES.items()}
    elif family in ("Electra", "Albert"):
        sizes["embedding_size"] = 16
    if family in ("Roberta", "XLMRoberta", "Camembert"):
        sizes["type_vocab_size"] = 1
    sizes["pad_token_id"] = tokenizer.pad_token_id
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), initializer_range=0.3, **{**sizes, **fields}
    )
    model = getattr(transformers, family + task)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model
