"""Language of a text, by py3langid (Lui and Baldwin 2012), which carries its model."""

import functools
from collections.abc import Callable

from bert_jax.errors import UserError, nearest, needs_package

_MAX_CHARS = 1000
"""Characters that are looked at: identification costs about as much as tokenizing."""


@functools.cache
def _identifier() -> tuple[Callable[[str], tuple[str, float]], frozenset[str]]:
    with needs_package(
        "finding the language of documents needs py3langid: pip install 'bert_jax[corpora]'."
    ):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier.classify, frozenset(identifier.nb_classes)


def identify(text: str) -> tuple[str, float]:
    """Return the code (ISO 639-1 where there is one) and the probability of a text's language.

    The first 1,000 characters decide.
    """
    language, probability = _identifier()[0](text[:_MAX_CHARS])
    return str(language), float(probability)


def check_language(code: str) -> None:
    """Refuse, with a UserError, a code that the model does not know."""
    known = _identifier()[1]
    if code not in known:
        near = nearest(code, sorted(known))
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(
            f"--language is {code!r}, which py3langid does not know.{hint} Codes are those of ISO "
            f"639, such as en, de and zh; {len(known)} are known."
        )
