"""Conversion between the `config.json` of an encoder of any family and our `ModelConfig`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from bert_jax.artefacts.formats.families import FAMILIES, MODERN
from bert_jax.artefacts.formats.family import (
    MAX_SIZE,
    Family,
    check_only,
    read_field,
    show,
    their_name,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig

_REQUIRED = {"vocab_size", "num_positions", "hidden_dim", "num_layers", "num_heads", "mlp_dim"}
"""Our fields that a `config.json` must set, unless its family is like BERT (`Family.like_bert`)."""
_LETTERS = {"full_attention": "G", "sliding_attention": "L"}
_THETAS = (
    ("full_attention", "global_rope_theta", "rope_theta", 160_000.0),
    ("sliding_attention", "local_rope_theta", "local_rope_theta", 10_000.0),
)
"""Rotary bases in files: current name, old name, our field, and ModernBERT's default."""
_LOCAL_ATTENTION = 128
_EVERY = 3
"""Default of ModernBERT: every third layer is global."""


def config_from_huggingface(found: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Return the architecture that a `config.json` describes.

    Fields that do not change what the encoder computes (heads, labels, generation) are ignored.
    `found["model_type"]` is in `FAMILIES`; `where` names the file in messages.
    Raise a UserError that lists all fields that are missing, wrong or not supported.
    """
    family = FAMILIES[found["model_type"]]
    classifies = family.head_of(found) == "classification"
    renamed = {name: found[other] for other, name in family.synonyms.items() if other in found}
    found = {**family.defaults, **found, **renamed}
    fields: dict[str, Any] = {**family.computes, **family.sets}
    wrong: list[str] = []
    for name, ours in family.fields.items():
        # A field that is null, unlike a missing field, does not get the default.
        reads_null = family.like_bert or name in family.defaults
        if found.get(name) is not None or (name in found and reads_null):
            fields[ours] = read_field(name, ours, found[name], wrong)
        elif ours in _REQUIRED and not family.like_bert:
            wrong.append(f"{name} is missing; it must be at least 1")
    fields |= {ours: fields[other] for ours, other in family.follows.items()}
    check_only(found, family.only, wrong)
    if family.first_position is not None:
        rows, pad = found["max_position_embeddings"], found["pad_token_id"]
        whole = type(rows) is type(pad) is int and pad >= 0
        if whole and (first := first_position(family, found)) < rows <= MAX_SIZE:
            fields["num_positions"] = rows - first
        else:
            wrong.append(
                f"max_position_embeddings is {show(rows)} and pad_token_id is {show(pad)}; as "
                "positions begin after the padding id, the table must have more rows"
            )
    if not family.has_types:
        fields["num_types"] = 1 if classifies else 2
    elif family.doubles_type and fields.get("num_types") == 1:
        fields["num_types"] = 2
    parts = found.get("rope_parameters") or {}
    if family.local:
        fields |= _layers(found, fields["num_layers"], wrong) if fields.get("num_layers") else {}
        for key, old, ours, default in _THETAS:
            part = parts.get(key) or {} if isinstance(parts, Mapping) else parts
            before = (old, found.get(old, default))
            fields[ours] = _theta(part, f"rope_parameters.{key}", before, wrong)
    elif family.computes["positions"] == "rope" and "rope_theta" not in family.computes:
        before = ("rope_theta", found.get("rope_theta", family.theta))
        fields["rope_theta"] = _theta(parts, "rope_parameters", before, wrong)
    _check_heads(family, found, fields, wrong)
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
    if family.narrows_mlp:
        # The file gives the ungated width. The gated width is 2/3 of it, up to a multiple of 8.
        fields["mlp_dim"] = -(-(2 * fields["mlp_dim"] // 3) // 8) * 8
    try:
        config = plain(ModelConfig(**fields))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not family.like_bert and (why := unlike(found["model_type"], config)):
        raise UserError(f"{where}: this is not a {family.name} that is supported: {'; '.join(why)}")
    # Only ELECTRA has embeddings of another width; fine-tuning then adds ELECTRA's classifier.
    own = classifies or config.projects_embeddings
    return replace(config, **family.classifies) if own and family.like_bert else config


def first_position(family: Family, found: Mapping[str, Any]) -> int:
    """Return the index of the first token's row in the position table."""
    assert family.first_position is not None
    return {**family.defaults, **found}["pad_token_id"] + family.first_position


def _check_heads(
    family: Family, found: Mapping[str, Any], fields: Mapping[str, Any], wrong: list[str]
) -> None:
    """Add a fault to `wrong` if width / heads is not an integer, or differs from `head_dim`."""
    names = {ours: name for name, ours in family.fields.items()}
    base = vars(ModelConfig()) if family.like_bert else {}
    width, heads = ({**base, **fields}.get(name) for name in ("hidden_dim", "num_heads"))
    if not (width and heads):
        return
    if width % heads:
        wrong.append(
            f"{names['hidden_dim']} {width} is not divisible by {names['num_heads']} {heads}"
        )
    if not family.like_bert and found.get("head_dim") not in (None, width // heads):
        wrong.append(
            f"head_dim is {show(found['head_dim'])}; only hidden_size / num_attention_heads, "
            f"{width // heads}, is supported"
        )


def kind_of(config: ModelConfig) -> str | None:
    """Return the `model_type` of the family that computes an architecture, or None.

    ELECTRA and DistilBERT count as bert: only their heads and embedding tables differ.
    """
    return next((kind for kind in ("bert", *MODERN) if not unlike(kind, config)), None)


def with_own_pooler(config: ModelConfig) -> ModelConfig:
    """Set the pooler and classifier fields of an architecture to the values of its family.

    An architecture that no family computes is returned unchanged.
    """
    for own in (replace(config, pooler=True), replace(config, pooler=False)):
        if (kind := kind_of(own)) is not None:
            return replace(own, **FAMILIES[kind].classifies)
    return config


def unlike(kind: str, config: ModelConfig) -> list[str]:
    """List the fields in which a configuration differs from a family."""
    family, config = FAMILIES[kind], plain(config)
    found = other_values(config, family.computes)
    found += [
        f"model.{name} is {getattr(config, name)!r}, unlike model.{other}"
        for name, other in family.follows.items()
        if name in ARCHITECTURE and getattr(config, name) != getattr(config, other)
    ]
    return found + family.refuses(config)


def refusal(config: ModelConfig, heads: Collection[str]) -> str:
    """Explain why no class of Transformers computes a model with these heads; "" if a class does.

    `heads` names pretraining heads; names other than `mlm`, `nsp` and `rtd` are ignored.
    """
    heads, kind = {"mlm", "nsp", "rtd"} & set(heads), kind_of(config)
    if kind is None:
        nearest = min(MODERN, key=lambda kind: len(unlike(kind, config)))
        return (
            "no class of Transformers computes this model. The nearest is "
            f"{MODERN[nearest].name}, but {'; '.join(unlike(nearest, config))}"
        )
    if kind != "bert":
        if there := " or ".join(sorted(heads - {"mlm"})):
            return (
                f"no {MODERN[kind].name} class of Transformers has the head {there}; pretrain on "
                "masked words only, with data.pairing none"
            )
    elif config.projects_embeddings or "rtd" in heads:  # an ELECTRA
        if "nsp" in heads:
            return (
                f"embeddings of width {config.embedding_width} with layers of width "
                f"{config.hidden_dim} have no head for pairs of sentences in Transformers; "
                "pretrain with data.pairing none, or set model.embedding_dim to 0"
            )
        if "mlm" in heads and config.activation != "gelu":
            return (
                f"model.activation is {config.activation}, but the masked-LM head of "
                "Transformers' ELECTRA always has the exact gelu"
            )
    elif heads != {"mlm"} and config.pooler_activation != "tanh":
        return (
            f"its pooler has {config.pooler_activation}, but no class of Transformers computes "
            "this activation with the rest of the model: a BERT's pooler has tanh"
        )
    return ""


def other_values(config: ModelConfig, computes: Mapping[str, Any]) -> list[str]:
    """List the fields of a configuration whose values differ from `computes`."""
    config = plain(config)
    return [
        f"model.{name} is {getattr(config, name)!r}, not {value!r}"
        for name, value in computes.items()
        if getattr(config, name) != value
    ]


def config_to_huggingface(kind: str, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` for an architecture, without the fields of a head.

    Fields that only affect execution (dtype, attention_impl, scan_unroll, remat) are left out. A
    field that older files name differently is written under both names.
    """
    family, config = FAMILIES[kind], plain(config)
    theirs: dict[str, Any] = {"model_type": kind}
    theirs |= {name: _value(config, ours) for name, ours in family.fields.items()}
    if family.like_bert:
        return theirs
    if family.narrows_mlp:
        theirs["intermediate_size"] = config.mlp_dim * 3 // 2
    theirs |= {name: value for name, (value, _) in family.only.items() if value is not None}
    if not family.local:
        if family.computes["positions"] == "rope" and "rope_theta" not in family.computes:
            parameters = {"rope_theta": config.rope_theta, "rope_type": "default"}
            theirs |= {"rope_theta": config.rope_theta, "rope_parameters": parameters}
        return theirs
    letters = [config.layer_kind(n).letter for n in range(config.num_layers)]
    names = {letter: name for name, letter in _LETTERS.items()}
    theirs |= {"layer_types": [names[letter] for letter in letters], "rope_parameters": {}}
    period = _period(letters)
    if period == "G" + "L" * (len(period) - 1):
        theirs["global_attn_every_n_layers"] = len(period)
    theirs["local_attention"] = 2 * config.local_window or _LOCAL_ATTENTION
    for key, old, ours, _ in _THETAS:
        theta = getattr(config, ours)
        theirs[old] = theta
        theirs["rope_parameters"][key] = {"rope_theta": theta, "rope_type": "default"}
    return theirs


def _value(config: ModelConfig, ours: str) -> Any:
    if ours == "head_activation":
        return their_name(ours, config.head_activation or config.activation)
    value = getattr(config, ours)
    if ours in ("activation", "relative_norm", "relative_terms"):
        return their_name(ours, value)
    if ours == "embedding_dropout_rate":
        return config.rate_of("embedding")
    if ours == "mlp_dropout_rate":
        return config.rate_of("mlp")
    written_for_zero = {
        "num_kv_heads": config.num_heads, "embedding_dim": config.hidden_dim,
        "relative_buckets": -1, "relative_distance": -1,
    }  # fmt: skip
    return value or written_for_zero.get(ours, value)


def _layers(found: Mapping[str, Any], number: int, wrong: list[str]) -> dict[str, Any]:
    """Return the pattern of global and local layers, and the window of the local layers."""
    every, types = found.get("global_attn_every_n_layers", _EVERY), found.get("layer_types")
    if types is None:
        if type(every) is not int or not 1 <= every <= 1024:
            wrong.append(f"global_attn_every_n_layers is {show(every)}; it must be from 1 to 1,024")
            return {}
        types = ["sliding_attention" if n % every else "full_attention" for n in range(number)]
    good = isinstance(types, list) and len(types) == number
    if not good or any(not isinstance(each, str) or each not in _LETTERS for each in types):
        wrong.append(
            f"layer_types is {show(types)}; it must have an entry for each of the {number} layers, "
            f"{' or '.join(_LETTERS)}"
        )
        return {}
    pattern = _period([_LETTERS[each] for each in types])
    width = found.get("local_attention", _LOCAL_ATTENTION)
    if type(width) is not int or not 2 <= width <= 1 << 24:
        wrong.append(f"local_attention is {show(width)}; it must be from 2 to {1 << 24:,}")
        return {}
    if (half := found.get("sliding_window")) not in (None, width // 2):
        wrong.append(f"sliding_window is {show(half)}, not {width // 2}, half of local_attention")
    return {"attention_pattern": pattern, "local_window": width // 2}


def _period(letters: list[str]) -> str:
    """Return the shortest pattern whose repetition gives the letters."""
    whole, count = "".join(letters), len(letters)
    return next(whole[:n] for n in range(1, count + 1) if (whole[:n] * count)[:count] == whole)


def _theta(part: Any, under: str, old: tuple[str, Any], wrong: list[str]) -> float | None:
    """Return the rotary base: `rope_theta` in `part`, or the value of an old field.

    `part` is (a section of) `rope_parameters`, `under` its name, `old` the old field and its value.
    """
    if not isinstance(part, Mapping):
        wrong.append(f"{under} is {show(part)}; an object with rope_theta is needed")
        return None
    name = "rope_type" if "rope_type" in part else "type"  # its older name
    if part.get(name, "default") != "default":
        wrong.append(f"{under}.{name} is {show(part[name])}; only 'default' is supported")
    if part.get("partial_rotary_factor", 1.0) not in (1, None):
        wrong.append(
            f"{under}.partial_rotary_factor is {show(part['partial_rotary_factor'])}; only 1.0, "
            "the rotation of complete heads, is supported"
        )
    name, value = (f"{under}.rope_theta", part["rope_theta"]) if "rope_theta" in part else old
    if type(value) in (int, float) and 0 < value < float("inf"):
        return float(value)
    hint = ""
    if value in (None, -1) and name.startswith(("local", "rope_parameters.sliding")):
        hint = "; if it stands for the theta of the global layers, write that theta"
    wrong.append(f"{name} is {show(value)}; it must be a number above 0, such as 10000.0{hint}")
    return None


def plain(config: ModelConfig) -> ModelConfig:
    """Normalise a configuration, so that configurations that mean the same become equal."""
    letters = [config.layer_kind(n).letter for n in range(config.num_layers)]
    kv_heads, activation = config.num_kv_heads, config.head_activation
    return replace(
        config,
        num_kv_heads=0 if kv_heads == config.num_heads else kv_heads,
        head_activation="" if activation == config.activation else activation,
        embedding_dim=0 if not config.projects_embeddings else config.embedding_dim,
        attention_pattern=_period(letters),  # of all layers: the last cycle may be incomplete
    )


def unlike_head(kind: str, config: ModelConfig, head: TaskHeadConfig) -> str:
    """Explain why no class of a family computes a head, or return "" if a class does."""
    family = FAMILIES[kind]
    if head.kind not in family.heads:
        return f"the family has no head for {head.kind}"
    if head.kind != "classification":
        return ""
    poolings = family.poolings.values()
    if poolings and head.pooling not in poolings:
        return f"the head's pooling is {head.pooling!r}, not {' or '.join(map(repr, poolings))}"
    config = replace(config, head_activation=config.head_activation or config.activation)
    found = ((name, getattr(config, name), value) for name, value in family.classifies.items())
    return "; ".join(f"model.{name} is {a!r}, not {b!r}" for name, a, b in found if a != b)
