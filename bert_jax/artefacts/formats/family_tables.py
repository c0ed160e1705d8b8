"""Names of the families of encoders, by family, and their names in BERT."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Names = tuple[tuple[str, str], ...]
"""Names of a family and of BERT, read both ways; the first that fits counts. A name that ends in a
point stands for all that begin with it, and `{n}` for the number of a layer."""


def _affine(theirs: str, bert: str) -> Names:
    return tuple((f"{theirs}.{part}", f"{bert}.{part}") for part in ("weight", "bias"))


@dataclass(frozen=True)
class Family:
    """Names of one family: classes, fields and parameters, and their names in BERT."""

    name: str
    classes: str
    """Prefix of the class names, as Bert is of BERT's; a regular expression."""
    prefix: str
    """Beginning of the encoder's names, which the file of a bare encoder may lack."""
    names: Names
    """Parameters of the encoder and the pretraining heads."""
    classifier: Names = ()
    """Parameters of the classification head: a map of the first token's state, an activation and a
    second map are BERT's pooler and classifier."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of their configuration that BERT's has with another default, or not at all."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration that have another name in BERT, to that name."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the classification head; BERT's own pooler has tanh."""
    tasks: tuple[str, ...] = ()
    """Classes, without the prefix, that a model of ours is written as."""
    has_types: bool = True
    """Whether the encoder has token types."""
    first_position: int | None = None
    """None: positions count from 0. Else they count from padding's id + this."""
    exact_gelu_head: bool = False
    """The masked-LM head has the exact GELU whatever the encoder has."""


TOKEN_HEADS: Mapping[str, Names] = {
    "tagging": _affine("classifier", "classifier"),
    "span": _affine("qa_outputs", "qa_outputs"),
}
"""Heads that are equal in all families."""
BUFFERS = r"(?:\w+\.)?embeddings\.(?:position_ids|token_type_ids)"
"""Names that hold nothing that was learned."""
_TRANSFORM = "cls.predictions.transform"
_DECODER = "cls.predictions.decoder"
_TWO_MAPS: Names = (
    ("classifier.dense.", "bert.pooler.dense."),
    ("classifier.out_proj.", "classifier."),
)

BERT = Family(
    name="BERT",
    classes="Bert",
    prefix="bert.",
    names=(
        ("bert.", "bert."),
        ("cls.", "cls."),
        *(name for names in TOKEN_HEADS.values() for name in names),
    ),
)

_ROBERTA = Family(
    name="RoBERTa",
    classes="Roberta|XLMRoberta|Camembert",
    prefix="roberta.",
    names=(
        ("roberta.embeddings.", "bert.embeddings."),
        ("roberta.encoder.", "bert.encoder."),
        ("roberta.pooler.", "bert.pooler."),
        ("lm_head.dense.", f"{_TRANSFORM}.dense."),
        ("lm_head.layer_norm.", f"{_TRANSFORM}.LayerNorm."),
        ("lm_head.bias", "cls.predictions.bias"),
        ("lm_head.decoder.", f"{_DECODER}."),
    ),
    classifier=_TWO_MAPS,
    defaults={"pad_token_id": 1, "max_position_embeddings": 512},
    first_position=1,
    exact_gelu_head=True,
)

_ELECTRA = Family(
    name="ELECTRA",
    classes="Electra",
    prefix="electra.",
    names=(
        ("electra.embeddings.", "bert.embeddings."),
        ("electra.embeddings_project.", "bert.embeddings_project."),
        ("electra.encoder.", "bert.encoder."),
        ("generator_predictions.dense.", f"{_TRANSFORM}.dense."),
        ("generator_predictions.LayerNorm.", f"{_TRANSFORM}.LayerNorm."),
        ("generator_lm_head.weight", f"{_DECODER}.weight"),
        ("generator_lm_head.bias", "cls.predictions.bias"),
        ("discriminator_predictions.", "discriminator_predictions."),
    ),
    classifier=_TWO_MAPS,
    defaults={
        "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    pooler_activation="gelu",
    tasks=(
        "Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering",
    ),
    exact_gelu_head=True,
)  # fmt: skip

_DISTILBERT = Family(
    name="DistilBERT",
    classes="DistilBert",
    prefix="distilbert.",
    names=(
        ("distilbert.embeddings.", "bert.embeddings."),
        *(
            (f"distilbert.transformer.layer.{{n}}.{theirs}.", f"bert.encoder.layer.{{n}}.{bert}.")
            for theirs, bert in (
                ("attention.q_lin", "attention.self.query"),
                ("attention.k_lin", "attention.self.key"),
                ("attention.v_lin", "attention.self.value"),
                ("attention.out_lin", "attention.output.dense"),
                ("sa_layer_norm", "attention.output.LayerNorm"),
                ("ffn.lin1", "intermediate.dense"),
                ("ffn.lin2", "output.dense"),
                ("output_layer_norm", "output.LayerNorm"),
            )
        ),
        ("vocab_transform.", f"{_TRANSFORM}.dense."),
        ("vocab_layer_norm.", f"{_TRANSFORM}.LayerNorm."),
        ("vocab_projector.weight", f"{_DECODER}.weight"),
        ("vocab_projector.bias", "cls.predictions.bias"),
    ),
    classifier=(
        ("pre_classifier.", "bert.pooler.dense."),
        *_affine("classifier", "classifier"),
    ),
    defaults={"n_layers": 6, "seq_classif_dropout": 0.2},
    fields={
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size", "activation": "hidden_act",
        "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
        "seq_classif_dropout": "classifier_dropout",
    },
    pooler_activation="relu",
    tasks=("ForSequenceClassification",),
    has_types=False,
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "bert": BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": _ELECTRA,
    "distilbert": _DISTILBERT,
}
"""Families by the field `model_type`."""
WRITTEN: Mapping[str, str] = {
    family.pooler_activation: kind for kind, family in FAMILIES.items() if family.tasks
}
"""Activation of the pooler to the `model_type` whose classifier has that activation; BERT's own is
not among them."""
