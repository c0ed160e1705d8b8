"""Ettin encoders of 17M, 32M, 68M, 150M, 400M and 1B parameters (Weller et al. 2025).

    bert-jax pretrain --config=configs/pretrain/ettin_17m.py --workdir=work/ettin \
        --config.data.corpus=work/corpus
    bert-jax plan --config=configs/pretrain/ettin_17m.py --topology=v5e:4x4 \
        --config.model.vocab_size=50368 --phase=all

Published (the recipe's own configuration files): ModernBERT's architecture; 1,700 billion tokens in
rows of 1,024 with a batch warm-up, 250 billion in rows of 7,999 with rotations of base 160,000 in
all layers (17M: in the global ones) while the rate falls to half as 1 - sqrt, 50 billion of other
documents (`training.phases[2].corpus`) with 15% masked while it falls to 0.02 of the peak. The 1B
model has a third of the last two. 4,608 rows a step throughout. Their hours on four H100: 141, 212,
300, 470, 950, 2,170.

Different here: rows of 8,192 in place of 7,999, since TPU kernels take multiples of 128; short
documents are packed. A decay that is 3e-4 a step at a rate of 3e-3 there is 0.1 here, where the
rate multiplies it.

Predicted here by `bert-jax plan` for 1B on v5p:4x4x4 as a loop over layers (model.scan_unroll=1):
640 rows of 8,192 in five micro-batches 2,796 ms a step, 48.8 of 95 GiB, MFU 0.49, 950 chip-hours
for its 100 billion tokens at that length. For 400M there, as a loop: rows of 1,024 in two
micro-batches 813 ms, 46.3 GiB, MFU 0.46, 5,210 chip-hours.
For 17M on v5e:4x4 with mesh.data=1, mesh.fsdp=16 and training.gather=step, the three kinds of rows
apart: 1,024 tokens in 12 micro-batches 288 ms a step, 5.4 of 16 GiB, MFU 0.30, 460 chip-hours;
8,192 in 32 micro-batches 4,042 ms, MFU 0.37, 120 chip-hours; the last phase in 24, 3,727 ms, MFU
0.36, 22 chip-hours.
For 32M there, as a loop: 1,024 tokens in 6 micro-batches 853 ms, 9.0 GiB, MFU 0.23, 1,370
chip-hours; 8,192 in 48, 9,698 ms, MFU 0.33, 285 chip-hours; the last phase 8,946 ms, 53 chip-hours.
training.accumulation holds for all phases: 32 fits all of 17M, 48 all of 32M; a phase may have its
own. Steps of a batch warm-up are rounded to it.
68M was not compiled; the shape of 150M is that of ModernBERT-base (`modernbert.py`).

The vocabulary size comes from the corpus; the published one has 50,368 tokens.
"""

from ml_collections import ConfigDict

from bert_jax.data.phases import Phase

# layers, width, heads, feed-forward; peak rate, decay; tokens of the warm-ups of rate and batch
_SIZES = {
    "17m": (7, 256, 4, 384, 3e-3, 0.1, 4e9, 125e9),
    "32m": (10, 384, 6, 576, 3e-3, 0.1, 4e9, 100e9),
    "68m": (19, 512, 8, 768, 3e-3, 0.1, 3e9, 75e9),
    "150m": (22, 768, 12, 1152, 8e-4, 0.0125, 3e9, 50e9),
    "400m": (28, 1024, 16, 2624, 5e-4, 0.02, 2e9, 10e9),
    "1b": (28, 1792, 28, 3840, 5e-4, 0.1, 2e9, 3e9),
}


def get_config(size: str = "150m") -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    if size not in _SIZES:
        raise ValueError(f"the size is {size!r}; expected one of {', '.join(_SIZES)}")
    layers, width, heads, mlp, peak, weight_decay, rate_warmup, batch_warmup = _SIZES[size]
    rows, part = 4608, 1 / 3 if size == "1b" else 1
    # The batch warm-up has an eighth, a quarter and half of the rows, for as many steps each.
    growing = round(batch_warmup / (rows * 1024 * 7 / 24))
    steps = (
        growing + round((1.7e12 - batch_warmup) / (rows * 1024)),
        round(part * 250e9 / (rows * 8192)),
        round(part * 50e9 / (rows * 8192)),
    )
    shares = [count / sum(steps) for count in steps]
    warming = Phase(1024, rows, steps[0], growing).steps_for(rate_warmup / 1024)
    longer = {"length": 8192, "batch_size": rows, "rope_theta": 160_000.0}
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
                    {
                        **longer,
                        "share": shares[1],
                        "local_rope_theta": 10_000.0 if size == "17m" else 160_000.0,
                        "decay": "one_minus_sqrt",
                        "end_rate": peak / 2,
                    },
                    {
                        **longer,
                        "share": shares[2],
                        "local_rope_theta": 160_000.0,
                        "masking_rate": 0.15,
                        "learning_rate": peak / 2,
                        "decay": "one_minus_sqrt",
                        "end_rate": 0.02 * peak,
                    },
                ),
            },
            "optimizer": {
                "name": "stable_adamw",
                "learning_rate": peak,
                "schedule": "constant",
                "warmup_steps": warming,
                "b2": 0.98,
                "weight_decay": weight_decay,
                "clip_norm": None,
            },
        }
    )
