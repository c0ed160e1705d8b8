from importlib import metadata

import pytest

from bert_jax.cli.verbs.corpora import Corpus
from bert_jax.cli.verbs.options import read
from bert_jax.data.corpus.cleaning.clean import CleaningConfig
from bert_jax.errors import UserError


def config_of(*arguments: str) -> CleaningConfig:
    return read(Corpus, "corpus", ["--tokenizer=t", *arguments]).cleaning()


def test_without_options_documents_stay_as_they_are():
    assert config_of() == CleaningConfig()
    assert config_of().is_empty
    assert not config_of().record()


def test_options_become_rules_and_their_record():
    config = config_of("--filter", "gopher", "--filter=words=5:", "--drop-duplicates=paragraphs")
    assert config == CleaningConfig(filters=("gopher", "words=5:"), duplicate_paragraphs=True)
    assert config.needs_scan
    record = config.record()
    words = {"low": 5, "high": None, "source": "Rae et al. 2021, A.1.1"}
    assert record["filters"]["words"] == words
    assert len(record["filters"]) == 18
    assert record["duplicate_paragraphs"] is True
    both = config_of("--drop-duplicates", "exact,near")
    assert (both.duplicates, both.duplicate_paragraphs, both.near_duplicates) == (True, False, 0.8)
    assert config_of("--drop-duplicates=near=0.7").near_duplicates == 0.7
    assert not config_of("--filter", "c4").needs_scan
    german = config_of("--language=de:0.6")
    assert (german.language, german.language_threshold) == ("de", 0.6)
    assert config_of("--language=de").language_threshold == 0.8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drop-duplicates=near=0.3"], "--drop-duplicates near=0.3"),
        (["--drop-duplicates=near=x"], "--drop-duplicates near: 'x' is not a number"),
        (["--drop-duplicates=exact=1"], "--drop-duplicates has 'exact=1'"),
        (["--drop-near-duplicates=0.8"], "--drop-near-duplicates is now --drop-duplicates near"),
        (["--language=de:0"], "--language de:0: the probability"),
        (["--language-threshold", "0.5"], "--language-threshold is now --language CODE:P"),
        (["--keep-dropped", "out"], "--keep-dropped works only with an option that"),
        (["--filter", "gophers"], "Did you mean 'gopher'"),
    ],
)
def test_options_that_cannot_be_meant(arguments: list[str], said: str):
    with pytest.raises(UserError) as error:
        config_of(*arguments)
    assert said in f"{error.value}"


def test_without_rensa_near_duplicates_are_refused(monkeypatch):
    """Before hours of scanning, and not with a traceback."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert config_of("--drop-duplicates=exact").duplicates
    with pytest.raises(UserError, match=r"needs rensa: pip install 'bert_jax\[corpora\]'"):
        config_of("--drop-duplicates=near")
