"""Export of a run's low-rank updates and head in PEFT's format, without the base model.

For the proof, the base model is written to a temporary directory, with zeros in place of the head.
The exported adapter is then applied to that base model by `formats.peft` and, if the packages are
installed, by `peft` with Transformers. The outputs must equal the run's.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.exchange import exported_files as files
from bert_jax.artefacts.exchange.huggingface import auto_class, proven
from bert_jax.artefacts.exchange.proof import ONLY_OURS, compare, logits_of, row_batches
from bert_jax.artefacts.exchange.theirs import TheirModel, missing
from bert_jax.artefacts.formats import peft as adapters
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.formats.huggingface_files import head_to_huggingface
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_adapted
from bert_jax.errors import UserError

_ENCODER = ("embeddings", "layers", "final_norm")


def check(saved: SavedModel) -> None:
    """Raise UserError if PEFT has no `task_type` for a model, or the model has no adapter."""
    why = ""
    if saved.outputs is None:
        why = "PEFT's format needs a task head, which this model lacks"
    elif files.class_of(saved) and files.task_of(saved) not in adapters.TASKS.values():
        why = f"PEFT has no task_type for the class {files.class_of(saved)}"
    elif saved.adapter is None:
        why = "it has no adapter; only `bert-jax finetune` with lora.rank above 0 makes one"
    if why:
        raise UserError(f"{saved.name}: {why}")


def write(saved: SavedModel, out: Path) -> None:
    """Write the adapter, labels and tokenizer of a run that `check` accepts into `out`."""
    adapter, outputs = saved.adapter, saved.outputs
    assert adapter is not None
    assert outputs is not None
    entries = files.entries_of(saved)
    updates = adapters.lora_tensors(adapter.lora, adapter.layers, saved.config, entries)
    updates = {name.removesuffix(".weight"): update for name, update in updates.items()}
    alpha = adapter.config.alpha
    tensors: dict[str, np.ndarray] = {}
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for module, update in updates.items():
        tensors[f"{adapters.PREFIX}{module}.lora_A.weight"] = update.a
        tensors[f"{adapters.PREFIX}{module}.lora_B.weight"] = update.b
        if update.maps > 1:
            patterns["rank_pattern"][module] = len(update.a)
            patterns["alpha_pattern"][module] = alpha * update.maps
    family = FAMILIES[files.family_of(saved)]
    above = {e.name for e in entries if e.path[0] != "encoder" or e.path[1] not in _ENCODER}
    heads = {name: array for name, array in files.state_dict_of(saved).items() if name in above}
    tensors |= {f"{adapters.PREFIX}{name}": array for name, array in heads.items()}
    # Modules that PEFT stores in full: the heads, and parts of the encoder such as the pooler.
    kept = {".".join(n.split(".")[: 1 + n.startswith(family.prefix)]) for n in heads}
    labels = head_to_huggingface(outputs) | family.pooling_fields(saved.pooling)
    tasks = {end: name for name, end in adapters.TASKS.items()}
    files.write_tokenizer(saved, out)
    if labels:
        files.write_json(out / adapters.LABELS, labels)
    config = {
        "peft_type": "LORA", "task_type": tasks[files.task_of(saved)],
        "base_model_name_or_path": saved.origin.config.get("init"), "inference_mode": True,
        "r": adapter.config.rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [*updates], "modules_to_save": sorted(kept),
    }  # fmt: skip
    files.write_json(out / adapters.CONFIG, config | patterns)
    files.write_arrays(out / adapters.WEIGHTS, tensors, format="pt")


def prove(saved: SavedModel, out: Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Apply the adapter to the base model, compare outputs; return the result of `proven`."""
    programs: list[Callable[[Any], dict[str, np.ndarray]]]
    packages = ["safetensors", "tokenizers"]
    theirs: dict[str, Any] = {"ran": False, "why": ONLY_OURS}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        files.write_huggingface(without_adapter(saved), base)
        programs = [partial(logits_of, read_adapted(adapters.read_adapter(out, base)))]
        if FAMILIES[files.family_of(saved)].native and not missing("peft", "transformers", "torch"):
            model = TheirModel(base, auto_class(files.class_of(saved)))
            model.adapt(out)
            programs.append(model.outputs)
            theirs = {"ran": True}
            packages += ["peft", "transformers", "torch"]
        found = compare(saved, row_batches(rows), *programs, optional={"pooled"})
    return proven({"bert_jax": {"ran": True}, "peft": theirs}, found, packages)


def without_adapter(saved: SavedModel) -> SavedModel:
    """Return the base model: without low-rank updates, and with zeros in its heads and pooler."""
    encoder = {
        name: part if name in _ENCODER else jax.tree.map(np.zeros_like, part)
        for name, part in saved.params["encoder"].items()
    }
    assert saved.adapter is not None
    encoder["layers"] = saved.adapter.layers
    heads = jax.tree.map(np.zeros_like, {**saved.params, "encoder": {}})
    return dataclasses.replace(saved, params={**heads, "encoder": encoder}, adapter=None)


_LOADING = """\
This is an adapter: low-rank updates and the head, without the base model. To load it with PEFT, \
replace `DIR` by this directory and `BASE` by the directory of the base model:

```python
from peft import PeftModel
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = {auto}.from_pretrained("BASE", num_labels={labels}{pooling})
model = PeftModel.from_pretrained(model, "DIR")
```

To load it with bert_jax, first run `ln -s BASE DIR/base`, where `BASE` is an absolute path:

```python
import bert_jax

model = bert_jax.load("DIR")
```

The base model is {base}. `labels.json` lists the labels."""


def loading(saved: SavedModel) -> str:
    """Describe how to apply the adapter, for the model card."""
    assert saved.head is not None
    fields = FAMILIES[files.family_of(saved)].pooling_fields(saved.pooling)
    return _LOADING.format(
        auto=auto_class(files.class_of(saved)),
        labels=saved.head.num_labels,
        pooling="".join(f', {name}="{value}"' for name, value in fields.items()),
        base=files.last_part(saved.origin.config.get("init")),
    )
