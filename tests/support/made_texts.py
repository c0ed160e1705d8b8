"""Texts of random words, in documents and paragraphs."""

import random


def make_text(num_documents: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    words = [f"word{n}" for n in range(200)]

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 12))).capitalize() + "."

    def paragraph() -> str:
        return " ".join(sentence() for _ in range(draw.randint(1, 5)))

    return "\n\n".join(
        "\n".join(paragraph() for _ in range(draw.randint(1, 4))) for _ in range(num_documents)
    )
