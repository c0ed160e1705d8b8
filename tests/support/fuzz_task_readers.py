"""Readers of fine-tuning data and of Hugging Face's files, for fuzz_readers.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def tables(separator: str) -> Callable[[Path], list[bytes]]:
    """CSV or TSV with a header and with a byte order mark, quotes and pairs."""
    rows = [("text", "label", "text_pair"), ('a "quoted" word', "good", "b"), ("é 漢", "bad", "")]

    def seeds(_: Path) -> list[bytes]:
        plain = "".join(separator.join(row) + "\n" for row in rows)
        quoted = "".join(
            separator.join('"' + cell.replace('"', '""') + '"' for cell in row) + "\r\n"
            for row in rows
        )
        return [plain.replace('"', "").encode(), b"\xef\xbb\xbf" + quoted.encode()]

    return seeds


def use_table(path: Path) -> None:
    """Classes, several labels and scores of pairs."""
    from bert_jax.errors import UserError
    from bert_jax.tasks.config import TableConfig
    from bert_jax.tasks.text.tables import read_texts

    found = 0
    for columns in (
        TableConfig(text_pair="text_pair", quoting=True),
        TableConfig(problem_type="multi_label", empty="skip", quoting=True),
    ):
        try:
            read_texts(path, columns)
            found += 1
        except UserError as error:
            refused = error
    if not found:
        raise refused


def columns(_: Path) -> list[bytes]:
    """CoNLL in tabs and in blanks, with documents."""
    sentences = [[("EU", "B-ORG"), ("rejects", "O")], [("Peter", "B-PER"), ("Blackburn", "I-PER")]]
    seeds = []
    for between in ("\t", " "):
        lines = [f"-DOCSTART-{between}O", ""]
        for sentence in sentences:
            lines += [*(f"{word}{between}{tag}" for word, tag in sentence), ""]
        seeds.append(("\n".join(lines) + "\n").encode())
    return seeds


def use_columns(path: Path) -> None:
    """Read, and converted to one scheme."""
    from bert_jax.tasks.tagging.schemes import convert, tag_labels
    from bert_jax.tasks.tagging.sources import read_columns

    tag_labels(convert(read_columns(path)))


def conllu(_: Path) -> list[bytes]:
    """CoNLL-U with a comment, a range and an empty node."""
    ids = ["# text = zum", "1-2", "1", "2", "2.1"]
    rows = [f"{each}\tzu\tzu\tADP\tAPPR\t_\t5\tcase\t_\t_" for each in ids[1:]]
    return ["\n".join([ids[0], *rows, "", *rows, ""]).encode()]


def use_conllu(path: Path) -> None:
    """Read with both tags."""
    from bert_jax.tasks.tagging.schemes import tag_labels
    from bert_jax.tasks.tagging.sources import read_conllu

    tag_labels(read_conllu(path, "xpos"), plain=True)
    read_conllu(path)


def trees(_: Path) -> list[bytes]:
    """CoNLL-U with heads, a range, an empty node, and a sentence of one word."""
    rows = [("1", "2", "det"), ("2", "3", "nsubj:pass"), ("3", "0", "root"), ("3.1", "_", "_")]
    lines = [f"{each}\ta\ta\tX\t_\t_\t{head}\t{name}\t_\t_" for each, head, name in rows]
    span = "1-2\taa" + "\t_" * 8
    one = "1\ta" + "\t_" * 4 + "\t0\troot\t_\t_"
    return ["\n".join(["# text = aa a", span, *lines, "", one, ""]).encode()]


def use_trees(path: Path) -> None:
    """Read without trees, and with trees, which are written again."""
    from bert_jax.tasks.parsing.trees import read_sentences

    read_sentences(path, labelled=False)
    for sentence in read_sentences(path):
        if sentence.tree is not None:
            sentence.with_tree(sentence.tree)


def choices(_: Path) -> list[bytes]:
    """SWAG's columns."""
    head = "sent1,sent2,ending0,ending1,ending2,ending3,label"
    return ["\n".join([head, "a b,He,c,d,e,f,1", '"q, r",,s,t,u,v,3', ""]).encode()]


def use_choices(path: Path) -> None:
    """Read with labels."""
    from bert_jax.tasks.choice import read_choices
    from bert_jax.tasks.config import ChoiceConfig

    read_choices(str(path), ChoiceConfig())


def token_lists(_: Path) -> list[bytes]:
    """JSON lines of words and tags."""
    rows = [{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, {"tokens": ["a"], "tags": ["O"]}]
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def use_token_lists(path: Path) -> None:
    """Read as the task does."""
    from bert_jax.tasks.tagging.sources import read_token_lists

    read_token_lists(path)


def squads(_: Path) -> list[bytes]:
    """Version 2.0, with and without an answer."""
    questions: list[dict[str, Any]] = [
        {"id": "1", "question": "Who?", "is_impossible": False,
         "answers": [{"text": "Ann", "answer_start": 0}]},
        {"id": "2", "question": "Why?", "is_impossible": True, "answers": []},
    ]  # fmt: skip
    paragraph = {"context": "Ann sees Bob.", "qas": questions}
    whole = {"version": "v2.0", "data": [{"title": "A", "paragraphs": [paragraph]}]}
    return [json.dumps(whole).encode()]


def use_squad(path: Path) -> None:
    """Read with answers that are not at their offset kept."""
    from bert_jax.tasks.squad.sources import read_squad

    read_squad(path, misplaced="keep")


def huggingface_configs(_: Path) -> list[bytes]:
    """As Transformers writes it."""
    from bert_jax.artefacts.formats.model_config import config_to_huggingface
    from bert_jax.model.config import SIZES

    bert = config_to_huggingface("bert", SIZES["tiny"]) | {"architectures": ["BertModel"]}
    others = [
        {"model_type": "roberta", "pad_token_id": 1, "architectures": ["RobertaForMaskedLM"]},
        {"model_type": "electra", "embedding_size": 128},
        {"model_type": "distilbert", "dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 512},
    ]
    return [json.dumps(bert | fields).encode() for fields in ({}, *others)]


def use_huggingface_config(path: Path) -> None:
    """To our configuration, of whatever family."""
    from bert_jax.artefacts.formats.families import family_to_import
    from bert_jax.artefacts.formats.form import form_of
    from bert_jax.files.untrusted.json_file import read_json_object

    found = read_json_object(path, max_bytes=1 << 20)
    arrays = {f"embeddings.{name}_embeddings.weight": np.zeros((1, 8), np.float32)
              for name in ("word", "position", "token_type")}  # fmt: skip
    family_to_import(found, where=str(path))
    form_of(found, arrays, where=str(path))
