import pytest

from bert_jax.cli.verbs.cleaning_options import add_cleaning, cleaning_config
from bert_jax.cli.verbs.options import Parser
from bert_jax.data.corpus.cleaning.config import CleaningConfig
from bert_jax.errors import UserError


def config_of(*arguments: str) -> CleaningConfig:
    parser = Parser()
    parser.flag("--drop-duplicates", "")
    add_cleaning(parser)
    return cleaning_config(parser.parse_args(arguments))


def test_without_options_documents_stay_as_they_are():
    assert config_of() == CleaningConfig()
    assert config_of().is_empty
    assert not config_of().record()


def test_options_become_rules_and_their_record():
    config = config_of("--filter", "gopher", "--filter=words=5:", "--drop-duplicate-paragraphs")
    assert config == CleaningConfig(filters=("gopher", "words=5:"), duplicate_paragraphs=True)
    assert config.needs_scan
    record = config.record()
    words = {"low": 5, "high": None, "source": "Rae et al. 2021, A.1.1"}
    assert record["filters"]["words"] == words
    assert len(record["filters"]) == 18
    assert record["duplicate_paragraphs"] is True
    assert config_of("--drop-near-duplicates").near_duplicates == 0.8
    assert config_of("--drop-near-duplicates", "0.7").near_duplicates == 0.7
    assert not config_of("--filter", "c4").needs_scan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drop-near-duplicates", "0.3"], "--drop-near-duplicates is 0.3"),
        (["--language-threshold", "0.5"], "belongs to --language"),
        (["--keep-dropped", "out"], "--keep-dropped has nothing to write"),
        (["--filter", "gophers"], "Did you mean 'gopher'"),
    ],
)
def test_options_that_cannot_be_meant(arguments: list[str], said: str):
    with pytest.raises(UserError) as error:
        config_of(*arguments)
    assert said in f"{error.value}"
