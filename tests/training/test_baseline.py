import numpy as np
import pytest
from small_run import small_config

from bert_jax.data.store import SpecialIds, TokenStore
from bert_jax.training.baseline import MARGIN, PlateauDetector, compare


def detector(**changes) -> PlateauDetector:
    config = small_config(
        training__num_steps=1000, optimizer={"learning_rate": 3e-3, "warmup_steps": 20}, **changes
    )
    return PlateauDetector(baseline=6.0, unknown_rate=0.0123, config=config)


def warnings_of(watched: PlateauDetector, losses) -> dict[int, str]:
    said = {step: watched.observe(step, loss) for step, loss in enumerate(losses, start=1)}
    return {step: text for step, text in said.items() if text}


def test_baseline_is_the_unigram_entropy_without_special_tokens():
    counts = np.array([50, 10, 50, 50, 50, 4, 2, 2], np.int64)
    store = TokenStore(
        tokens=np.zeros(218, np.uint16),
        sentence_offsets=np.zeros(1, np.int64),
        document_offsets=np.zeros(1, np.int64),
        unigram_counts=counts,
        vocab_size=8,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        tokenizer_fingerprint="t",
        fingerprint="f",
    )
    watched = PlateauDetector.of(store, small_config())
    assert watched.baseline == pytest.approx(1.5 * np.log(2))
    assert watched.unknown_rate == pytest.approx(10 / 218)


def test_warns_once_at_the_plateau_with_numbers_and_causes():
    watched = detector()
    said = warnings_of(watched, [6.02] * 1000)
    assert list(said) == [watched.judged_at] == [20 + 250]
    (text,) = said.values()
    for part in (
        "6.020 nats at step 270", "entropy of the corpus is 6.000", "0.003, is too high (try 1e-3)",
        "20 of 1,000 steps", "16 rows of 32, 512 tokens a step", "1,000 steps are too few",
        "1.2% of its tokens are unknown",
    ):  # fmt: skip
        assert part in text.replace("1.0e-3", "1e-3"), part
    assert "\n" not in text


def test_silent_when_the_loss_falls_even_if_it_started_at_the_baseline():
    falling = [max(6.0, 9 - 0.1 * step) - max(0, step - 150) * 0.005 for step in range(1000)]
    assert warnings_of(detector(), falling) == {}


def test_margin_below_the_baseline_counts_as_plateau():
    assert warnings_of(detector(), [6.0 - 0.5 * MARGIN] * 1000)
    assert not warnings_of(detector(), [6.0 - 2 * MARGIN] * 1000)


def test_a_long_warm_up_is_not_named_as_a_cause():
    watched = PlateauDetector(
        6.0,
        0.0,
        small_config(training__num_steps=1000, optimizer__warmup_steps=100),
    )
    (text,) = warnings_of(watched, [6.02] * 1000).values()
    assert "warm-up is too short" not in text


def test_state_survives_a_restart():
    losses = 6.5 - 0.003 * np.arange(1000.0)
    whole, first, second = detector(), detector(), detector()
    for step, loss in enumerate(losses[:100], start=1):
        whole.observe(step, loss)
        (first if step <= 40 else second).observe(step, loss)
        if step == 40:
            second.restore(first.state())
    assert whole.state() == second.state()


def test_judgement_falls_within_the_run():
    config = small_config(training__num_steps=6, optimizer__warmup_steps=5)
    watched = PlateauDetector(6.0, 0.0, config)
    assert watched.judged_at == 6
    assert list(warnings_of(watched, [7.0] * 6)) == [6]


def test_compare_names_the_side():
    assert compare(6.5, 7.0) == "6.500 nats, 0.500 below unigram entropy"
    assert compare(7.25, 7.0) == "7.250 nats, 0.250 above unigram entropy"


def test_a_loss_far_above_the_line_is_not_called_a_plateau():
    (text,) = warnings_of(detector(), [7.4] * 1000).values()
    assert "has not yet learnt even how frequent" in text
    assert "too low for so short a run (try 9e-3)" in text.replace("9.0e-3", "9e-3")
