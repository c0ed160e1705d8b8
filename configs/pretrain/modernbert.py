"""ModernBERT-base or -large: 8,192 tokens in three phases (Warner et al. 2024, section 2).

    bert-jax pretrain --config=configs/pretrain/modernbert_base.py --workdir=work/modernbert \
        --config.data.corpus=work/corpus
    bert-jax plan --config=configs/pretrain/modernbert_base.py --topology=v5e:16x16 \
        --config.model.vocab_size=50368 --phase=all

Published: 1,719 billion tokens in rows of 1,024 with a batch warm-up, 250 billion in rows of 8,192
with slower rotations in the global layers, 50 billion while the rate falls as 1 - sqrt. 30% of the
tokens are masked, dropout is that of attention outputs, the optimizer is StableAdamW. Its decay of
1e-5 a step at the peak rate is 1e-5 / peak here, where the rate multiplies it.

Different here: rows of a step that divide over 256 chips (base: 512 for 576 in the long phases) or
64 (large: 4,608 for 4,928, 640 for 616 and 624), the same tokens in all; large keeps its rate for
the whole first phase (published: 5e-5 from 900 billion tokens on, after a rollback), and its
decay of the later phases is of the same 2e-2 (published: 1e-6 a step).

Predicted here by `bert-jax plan` for base on v5e:16x16 with mesh.data=1, mesh.fsdp=256,
training.gather=step, training.accumulation=2 and training.reduce_dtype=bfloat16: rows of 1,024
take 145 ms a step, 5.2 of 16 GiB, MFU 0.53, 3,750 chip-hours; rows of 8,192 take 219 ms, MFU 0.51,
1,120 chip-hours for both long phases. The batch warm-up is rounded there to steps of 512, 1,024 and
2,048 rows.
For large on v5p:4x4x4, as a loop over layers: rows of 1,024 in two micro-batches 813 ms, 46.3 of 95
GiB, MFU 0.46, 5,270 chip-hours; rows of 8,192 in two, 1,279 ms, 50.4 GiB, MFU 0.45, 1,300
chip-hours for both long phases.

The vocabulary size comes from the corpus; the published one has 50,368 tokens.
"""

from ml_collections import ConfigDict

from bert_jax.data.phases import Phase

# layers, width, heads, feed-forward; rates and rows of the first and the long phases; tokens of the
# warm-ups of rate and batch
_SIZES = {
    "base": (22, 768, 12, 1152, 8e-4, 3e-4, 4608, 512, 3e9, 50e9),
    "large": (28, 1024, 16, 2624, 5e-4, 5e-5, 4608, 640, 2e9, 10e9),
}


def get_config(size: str = "base") -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    if size not in _SIZES:
        raise ValueError(f"the size is {size!r}; expected one of {', '.join(_SIZES)}")
    layers, width, heads, mlp, peak, late, rows, long_rows, rate_warmup, batch_warmup = _SIZES[size]
    # The batch warm-up has an eighth, a quarter and half of the rows, for as many steps each.
    growing = round(batch_warmup / (rows * 1024 * 7 / 24))
    steps = (
        growing + round((1.719e12 - batch_warmup) / (rows * 1024)),
        round(250e9 / (long_rows * 8192)),
        round(50e9 / (long_rows * 8192)),
    )
    shares = [count / sum(steps) for count in steps]
    warming = Phase(1024, rows, steps[0], growing).steps_for(rate_warmup / 1024)
    longer = {
        "length": 8192,
        "batch_size": long_rows,
        "learning_rate": late,
        "rope_theta": 160_000.0,
    }
    return ConfigDict(
        {
            "model": {
                "num_layers": layers,
                "hidden_dim": width,
                "num_heads": heads,
                "mlp_dim": mlp,
                "num_positions": 8192,
                "num_types": 0,
                "norm_order": "pre",
                "norm_eps": 1e-5,
                "norm_bias": False,
                "first_norm": False,
                "positions": "rope",
                "attention_pattern": "GLL",
                "local_window": 64,
                "gated": True,
                "attention_bias": False,
                "mlp_bias": False,
                "pooler": False,
                "head_bias": False,
                "init": "scaled",
                "hidden_dropout_rate": 0.1,
                "attention_dropout_rate": 0.0,
                "embedding_dropout_rate": 0.0,
                "mlp_dropout_rate": 0.0,
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.3},
            "training": {
                "num_steps": sum(steps),
                "phases": (
                    {
                        "length": 1024,
                        "batch_size": rows,
                        "share": shares[0],
                        "batch_warmup_steps": growing,
                    },
                    {**longer, "share": shares[1], "decay": "constant"},
                    {
                        **longer,
                        "share": shares[2],
                        "decay": "one_minus_sqrt",
                        "end_rate": 0.001 * late,
                    },
                ),
            },
            "optimizer": {
                "name": "stable_adamw",
                "learning_rate": peak,
                "schedule": "constant",
                "warmup_steps": warming,
                "b2": 0.98,
                "weight_decay": 1e-5 / peak,
                "clip_norm": None,
            },
        }
    )
