"""Loading section of a model card, and escaping of text for a card."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from bert_jax.artefacts.exchange.huggingface import auto_class
from bert_jax.artefacts.exchange.huggingface_files import family_of, task_of
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.saved.model import SavedModel

PIPELINES = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
"""Pipelines of Transformers, by class-name suffix."""
_LOADING = """\
## Loading

{theirs}
With bert_jax:

```python
import bert_jax

model = bert_jax.load("DIR")
```

In Transformers the names of special tokens, such as `[MASK]`, are special wherever a \
text has them; `split_special_tokens=True` reads them as text, as bert_jax does."""
_THEIRS = """\
With Transformers, `DIR` being this directory:

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("DIR")
```
"""
_NO_CLASS = """\
Transformers has no class of {0}, and `config.json` names no code: `AutoTokenizer` loads the \
directory `DIR`, `AutoModel` does not. Who trusts the published code of {0} copies `auto_map` from \
its `config.json` and loads `DIR` with `trust_remote_code=True`.
"""
_TRANSLATING = """\
## Loading

With Transformers, `DIR` being this directory:

```python
from transformers import AutoTokenizer, {name}

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {name}.from_pretrained("DIR")
batch = tokenizer(["A text.", "Another text."], return_tensors="pt", padding=True)
found = model.generate(**batch)
print(tokenizer.batch_decode(found, skip_special_tokens=True))
```

`generation_config.json` has the search: five beams, scores divided by the number of tokens.

With bert_jax:

```python
import bert_jax

print(bert_jax.load("DIR").translate(["A text.", "Another text."]))
```"""
_ADAPTING = """\
## Loading

This is an adapter: low-rank updates and the head, without the model that they adapt. With PEFT, \
`DIR` being this directory and `BASE` that of the adapted model:

```python
from peft import PeftModel
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("BASE", num_labels={labels})
model = PeftModel.from_pretrained(model, "DIR")
```

With bert_jax, after `ln -s BASE DIR/base`, `BASE` as an absolute path:

```python
import bert_jax

model = bert_jax.load("DIR")
```

The adapted model: {base}. `labels.json` has the labels."""
_PIPELINE = """
```python
from transformers import pipeline

model = pipeline("{}", model="DIR")
```
"""


def loading_text(saved: SavedModel, parity: Mapping[str, Any]) -> str:
    """Return the loading section for the format and class in the parity file."""
    if parity["format"] == "peft" and saved.outputs is not None:
        return _ADAPTING.format(
            auto=auto_class(parity["class"]),
            labels=saved.outputs.head.num_labels,
            base=last_part(saved.origin.config.get("init")),
        )
    if parity["format"] != "huggingface":
        return (
            "## Loading\n\nThe documentation of bert_jax on exports says how the format "
            f"`{parity['format']}` is loaded."
        )
    if saved.network is not None:
        return _TRANSLATING.format(name=parity["class"])
    family = FAMILIES[family_of(saved)]
    if not family.native:
        return _LOADING.format(theirs=_NO_CLASS.format(family.name))
    kind, said = PIPELINES.get(task_of(saved)), _THEIRS.format(auto=auto_class(parity["class"]))
    if kind and kind not in ("question-answering", "multiple-choice"):  # do not exist
        said += _PIPELINE.format(kind)
        if saved.outputs is not None and saved.outputs.objective == "regression":
            said += "\nThe pipeline gives the number itself: `problem_type` is regression.\n"
    return _LOADING.format(theirs=said)


def last_part(path: Any) -> str:
    """Return the last part of a path, so that a card does not reveal local directories."""
    return plain(PurePath(str(path or "unknown")).name)


def plain(text: str) -> str:
    """Put a text on one line, without characters that would end a code span or a table cell."""
    return "".join(c if c.isprintable() and c not in "`|<>" else " " for c in text)[:120]
