"""Names of the families of encoders, by family, and their names in BERT."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Patterns = tuple[tuple[str, str], ...]
"""(regular expression over a whole name, its replacement); the first that matches counts."""


@dataclass(frozen=True)
class Family:
    """Names of one family: classes, fields and parameters, and their names in BERT."""

    name: str
    classes: str
    """Prefix of the class names, as Bert is of BERT's; a regular expression."""
    defaults: Mapping[str, Any]
    """Fields of their configuration that BERT's has with another default, or not at all."""
    fields: Mapping[str, str]
    """Fields of the configuration that have another name in BERT, to that name."""
    patterns: Patterns
    """Parameters of the encoder and the masked-LM head to BERT's names."""
    classifier: Patterns
    """Parameters of the classification head to BERT's names: a map of the first token's state, an
    activation and a second map are BERT's pooler and classifier."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the classification head; BERT's own pooler has tanh."""
    tasks: tuple[str, ...] = ()
    """Classes, without the prefix, that a model of ours is written as."""
    written: Patterns = ()
    """BERT's names of the encoder and the masked-LM head to theirs; a name that no pattern matches
    is left out."""
    written_classifier: Patterns = ()
    """BERT's names of the classification head to theirs."""
    skipped: str = "(?!)"
    """Names of buffers, which hold nothing that was learned."""
    first_position: int | None = None
    """None: positions count from 0. Else they count from padding's id + this."""
    exact_gelu_head: bool = False
    """The masked-LM head has the exact GELU whatever the encoder has."""


SAME: Patterns = (
    (r"bert\..+", r"\g<0>"),
    (r"cls\..+", r"\g<0>"),
    (r"(classifier|qa_outputs)\.(weight|bias)", r"\g<0>"),
)
TOKEN_HEADS: Mapping[str, Patterns] = {
    "tagging": ((r"classifier\.(weight|bias)", r"\g<0>"),),
    "span": ((r"qa_outputs\.(weight|bias)", r"\g<0>"),),
}
"""Heads that are equal in all families."""
_TWO_MAPS: Patterns = (
    (r"classifier\.dense\.(.+)", r"bert.pooler.dense.\1"),
    (r"classifier\.out_proj\.(.+)", r"classifier.\1"),
)

_ROBERTA = Family(
    name="RoBERTa",
    classes="Roberta|XLMRoberta|Camembert",
    defaults={"pad_token_id": 1, "max_position_embeddings": 512},
    fields={},
    patterns=(
        (r"(?:roberta\.)?((?:embeddings|encoder|pooler)\..+)", r"bert.\1"),
        (r"lm_head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"lm_head\.layer_norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"lm_head\.bias", "cls.predictions.bias"),
        (r"lm_head\.decoder\.(.+)", r"cls.predictions.decoder.\1"),
    ),
    classifier=_TWO_MAPS,
    skipped=r"(?:roberta\.)?embeddings\.(?:position_ids|token_type_ids)",
    first_position=1,
    exact_gelu_head=True,
)

ELECTRA = Family(
    name="ELECTRA",
    classes="Electra",
    defaults={
        "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    fields={},
    patterns=(
        (r"(?:electra\.)?((?:embeddings|embeddings_project|encoder)\..+)", r"bert.\1"),
        (r"generator_predictions\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"generator_predictions\.LayerNorm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"generator_lm_head\.weight", "cls.predictions.decoder.weight"),
        (r"generator_lm_head\.bias", "cls.predictions.bias"),
        (r"discriminator_predictions\..+", r"\g<0>"),
    ),
    classifier=_TWO_MAPS,
    pooler_activation="gelu",
    tasks=(
        "Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering",
    ),
    written=(
        (r"bert\.(embeddings|embeddings_project|encoder)\.(.+)", r"electra.\1.\2"),
        (r"cls\.predictions\.transform\.(.+)", r"generator_predictions.\1"),
        (r"cls\.predictions\.bias", "generator_lm_head.bias"),
        (r"discriminator_predictions\..+", r"\g<0>"),
    ),
    written_classifier=(
        (r"bert\.pooler\.(.+)", r"classifier.\1"),
        (r"classifier\.(.+)", r"classifier.out_proj.\1"),
    ),
    skipped=r"(?:electra\.)?embeddings\.(?:position_ids|token_type_ids)",
    exact_gelu_head=True,
)  # fmt: skip

_DISTILBERT_LAYER = r"(?:distilbert\.)?transformer\.layer\.(\d+)\."
_DISTILBERT_PARTS = {
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
DISTILBERT = Family(
    name="DistilBERT",
    classes="DistilBert",
    defaults={"n_layers": 6, "seq_classif_dropout": 0.2},
    fields={
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size", "activation": "hidden_act",
        "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
        "seq_classif_dropout": "classifier_dropout",
    },
    patterns=(
        (r"(?:distilbert\.)?embeddings\.(.+)", r"bert.embeddings.\1"),
        *(
            (_DISTILBERT_LAYER + re.escape(theirs) + r"\.(.+)", rf"bert.encoder.layer.\1.{bert}.\2")
            for theirs, bert in _DISTILBERT_PARTS.items()
        ),
        (r"vocab_transform\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"vocab_layer_norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"vocab_projector\.weight", "cls.predictions.decoder.weight"),
        (r"vocab_projector\.bias", "cls.predictions.bias"),
    ),
    classifier=(
        (r"pre_classifier\.(.+)", r"bert.pooler.dense.\1"),
        (r"classifier\.(weight|bias)", r"\g<0>"),
    ),
    pooler_activation="relu",
    tasks=("ForSequenceClassification",),
    written=(
        (r"bert\.embeddings\.(?!token_type)(.+)", r"distilbert.embeddings.\1"),
        *(
            (rf"bert\.encoder\.layer\.(\d+)\.{re.escape(bert)}\.(weight|bias)",
             rf"distilbert.transformer.layer.\1.{theirs}.\2")
            for theirs, bert in _DISTILBERT_PARTS.items()
        ),
    ),
    written_classifier=(
        (r"bert\.pooler\.dense\.(.+)", r"pre_classifier.\1"),
        (r"classifier\..+", r"\g<0>"),
    ),
    skipped=r"(?:distilbert\.)?embeddings\.position_ids",
)  # fmt: skip

BERT = Family(
    name="BERT",
    classes="Bert",
    defaults={},
    fields={},
    patterns=SAME,
    classifier=SAME[2:],
)

FAMILIES: Mapping[str, Family] = {
    "bert": BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": ELECTRA,
    "distilbert": DISTILBERT,
}
"""Families by the field `model_type`."""
WRITTEN: Mapping[str, str] = {
    family.pooler_activation: kind for kind, family in FAMILIES.items() if family.written
}
"""Activation of the pooler to the `model_type` whose classifier has that activation; BERT's own is
not among them."""
