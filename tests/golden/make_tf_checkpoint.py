"""Write tests/golden/tf_checkpoint: a tiny BERT as TensorFlow 1's Saver stores it, and its logits.

    python tests/golden/make_tf_checkpoint.py       (in an environment with tensorflow-cpu)

The files in the repository were made with TensorFlow 2.21.0 through `tf.compat.v1`: the names of
google-research/bert, the slots of its optimizer, two shards. The logits are computed here by
TensorFlow with the tanh-GELU of that repository, from the variables as they lie in the graph, so
that a kernel which is read the wrong way round shows.
"""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
OUT = Path(__file__).parent / "tf_checkpoint"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "##s"]
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "max_position_embeddings": 10,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
    "vocab_size": len(WORDS),
}
WIDTH, HEADS, MIDDLE = 8, 2, 12
TOKENS = np.array([[2, 5, 6, 7, 8, 9, 10, 3], [2, 6, 11, 3, 7, 3, 0, 0]], np.int32)
TYPES = np.array([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0]], np.int32)


def variable(name, *shape):
    """Values of a size at which the two forms of GELU differ."""
    random = np.random.default_rng(
        list(name.encode()) + list(v1.get_variable_scope().name.encode())
    )
    return v1.get_variable(name, initializer=random.normal(size=shape).astype(np.float32))


def dense(x, name, width):
    with v1.variable_scope(name):
        kernel = variable("kernel", int(x.shape[-1]), width)
        return tf.matmul(x, kernel) + variable("bias", width)


def norm(x):
    with v1.variable_scope("LayerNorm"):
        beta, gamma = variable("beta", WIDTH), variable("gamma", WIDTH)
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-12) * gamma + beta


def gelu(x):
    return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, bias):
    rows, length = TOKENS.shape

    def heads(name):
        shape = (rows, length, HEADS, WIDTH // HEADS)
        return tf.transpose(tf.reshape(dense(x, name, WIDTH), shape), (0, 2, 1, 3))

    with v1.variable_scope("self"):
        query, key, value = heads("query"), heads("key"), heads("value")
    scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(WIDTH // HEADS) + bias
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), (0, 2, 1, 3))
    return tf.reshape(mixed, (rows, length, WIDTH))


def bert():
    """Logits of both heads; variables are made on the way, on two devices for two shards."""
    with v1.variable_scope("bert"):
        with v1.variable_scope("embeddings"), tf.device("/cpu:1"):
            table = variable("word_embeddings", len(WORDS), WIDTH)
            types = variable("token_type_embeddings", 2, WIDTH)
            positions = variable("position_embeddings", 10, WIDTH)
            x = tf.gather(table, TOKENS) + tf.gather(types, TYPES)
            x = norm(x + positions[: TOKENS.shape[1]])
        bias = np.where(TOKENS == 0, -1e9, 0.0).astype(np.float32)[:, None, None, :]
        for n in range(2):
            with v1.variable_scope(f"encoder/layer_{n}"), tf.device(f"/cpu:{n}"):
                with v1.variable_scope("attention"):
                    mixed = attention(x, bias)
                    with v1.variable_scope("output"):
                        x = norm(dense(mixed, "dense", WIDTH) + x)
                with v1.variable_scope("intermediate"):
                    up = gelu(dense(x, "dense", MIDDLE))
                with v1.variable_scope("output"):
                    x = norm(dense(up, "dense", WIDTH) + x)
        with v1.variable_scope("pooler"):
            pooled = tf.tanh(dense(x[:, 0], "dense", WIDTH))
    with v1.variable_scope("cls/predictions"):
        with v1.variable_scope("transform"):
            hidden = norm(gelu(dense(x, "dense", WIDTH)))
        mlm = tf.matmul(hidden, table, transpose_b=True) + variable("output_bias", len(WORDS))
    with v1.variable_scope("cls/seq_relationship"):
        weights, bias = variable("output_weights", 2, WIDTH), variable("output_bias", 2)
        nsp = tf.matmul(pooled, weights, transpose_b=True) + bias
    return mlm, nsp


def main():
    """Writes the files."""
    with tf.Graph().as_default():
        mlm, nsp = bert()
        for slot in ("adam_m", "adam_v"):
            with v1.variable_scope("bert/embeddings/LayerNorm"):
                v1.get_variable(f"beta/{slot}", initializer=np.zeros(WIDTH, np.float32))
        v1.train.create_global_step()
        devices = v1.ConfigProto(device_count={"CPU": 2})
        with v1.Session(config=devices) as session:
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(sharded=True)
            saver.save(session, str(OUT / "bert_model.ckpt"), write_meta_graph=False)
            logits = session.run({"mlm": mlm, "nsp": nsp})
    (OUT / "checkpoint").unlink()
    (OUT / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (OUT / "vocab.txt").write_text("".join(word + "\n" for word in WORDS))
    np.savez_compressed(OUT / "logits.npz", tokens=TOKENS, types=TYPES, **logits)


if __name__ == "__main__":
    main()
